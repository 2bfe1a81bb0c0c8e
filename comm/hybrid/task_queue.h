// TaskQueue: carries out the collectives of the ranks of one or several hosts, in order: shared memory within
// a host, Gloo between hosts. See [Note: hybrid collectives] in plan.h and [Note: pieces] in tasks.h.
//
// A reduce-scatter, piece n, as a rank of the first of two hosts sees it:
//   issue            the caller's thread cuts the buffer into pieces and returns
//   begin            posted = n: the ranks of this host can read the input
//   reduce           when all of them have posted n: adds up its column's slices over them; reduced = n
//   start_exchange   sends the other host's sum over Gloo
//   finish_exchange  when the other host's sum is there: own sum + theirs, to `into`
//   share            done = n (a gather copies here what the other ranks of the host have brought)
//   finish           when all of this host have reduced n: the caller may write to its buffer again
//   wait             the caller's thread finds it done
// On one host there is nothing to exchange, and `reduce` writes straight to `into`.
//
// Who takes the steps.
// On several hosts a piece waits for the ranks of its host, then for the network, then for the ranks of its
// host again, while the rank's own thread computes. So a thread of the queue's own takes the pieces from step
// to step, and sleeps in between, on the host's shared counters (comm/shm/progress_counters.h), which Gloo's
// threads also notify. On one host no thread works in the background: it would take time from the cores, all
// of which train. Each of the caller's calls takes every piece as far as it can go, so a rank that waits
// never delays another. In both cases no rank waits for another rank's computation, and a rank adds up its
// own slices only (but for staged all-reduces on one host, whose pieces are small: see reduce_to_result()).
//
// [Note: each step in order]
// Pieces are numbered, equally on all ranks. A rank takes every step of piece n, but for the last one,
// `finish`, after the same step of piece n - 1, but a later piece may be in an earlier step: one is being
// reduced while another is on the network. Reductions and gathers between hosts have a process group each, so
// that their order relative to each other does not matter: Gloo's few threads work through a group's
// collectives in the order in which they were issued, and ranks that issued them in different orders could
// wait for each other.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/control/hosts.h"
#include "comm/gloo/gloo.h"
#include "comm/hybrid/tasks.h"
#include "comm/shm/progress_counters.h"
#include "comm/shm/reduce.h"
#include "comm/shm/shared_regions.h"

namespace tessera::comm::hybrid {

/// Owns the network side of a column that this rank carries. Its ranks are the hosts.
struct Column {
  int number = 0;
  std::unique_ptr<GlooTransport> reduce, gather;
  uint32_t num_reduced = 0, num_gathered = 0;  ///< for tags
};

/// Owns the thread, the counters, the staging memory and the columns. One thread at a time, except abort().
/// On one host every call may throw CommError: other ranks issued something else, left, or are gone.
class TaskQueue {
 public:
  /// Makes the columns' transports, of several hosts; `on_end` and `on_failure` are for them.
  using MakeColumns =
      std::function<std::vector<Column>(std::function<void()> on_end, const FailureHook& on_failure)>;

  /// Collective. `peers`: the ranks of this host. `on_failure`: called by the queue's thread, or Gloo's.
  TaskQueue(std::shared_ptr<const Hosts> hosts, int rank, std::shared_ptr<shm::PeerSockets> peers,
            std::chrono::milliseconds timeout, FailureHook on_failure, const MakeColumns& make_columns);
  ~TaskQueue();
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  /// Collective, in one order over this group and all its duplicates. See SharedRegions::allocate().
  std::shared_ptr<shm::SharedRegion> allocate(int64_t bytes, bool common);
  /// See SharedRegions::peer_address().
  const void* peer_address(const void* mine, int64_t bytes, int index) const {
    return regions_.peer_address(mine, bytes, index);
  }
  /// Called about ten times a second while allocate() or issue() waits. May throw, which ends the call; the
  /// group is then to be aborted.
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }

  /// Collective. Does not wait, but on one host for room: until the ranks have done with what was issued 64
  /// pieces before, or with what was staged before.
  void issue(const OperationPtr& operation);
  /// Whether it is done, after at most `limit`; 0 asks without waiting. Throws CommError: the queue has
  /// failed, or the operation's time is over.
  bool wait(const Operation& operation, std::chrono::milliseconds limit);

  /// Of several hosts: waits for what is in flight, unless it has failed, and ends the thread.
  void close();
  /// Everything fails, on the other ranks too. Never throws.
  void abort();

  /// Bytes of collectives that this rank has received from other hosts.
  int64_t received_bytes() const { return received_bytes_.load(std::memory_order_relaxed); }

 private:
  using Counter = shm::ProgressCounters::Counter;

  int index() const { return hosts_->index_of(rank_); }
  int host() const { return hosts_->host_of(rank_); }
  bool on_one_host() const { return hosts_->is_one(); }
  std::string timed_out() const;
  std::string has_left() const;
  void make_staging();

  /// On one host: takes steps in the caller's call until `condition` is true; false: it is not at `until`.
  template <class Condition>
  bool advance_until(const Condition& condition, std::chrono::steady_clock::time_point until);
  void advance_now();
  /// On one host: returns when the others can read the input.
  void post(const Operation& operation);

  // What the thread does.
  void run();
  void work();
  void take_issued();
  /// Takes pieces as far as they can go. False: none has moved.
  bool advance();
  template <class Step>
  bool advance(uint64_t& passed, uint64_t limit, const Step& step);
  Task& task(uint64_t number) { return tasks_[number - finished_ - 1]; }
  void fail(const std::string& cause);
  void check_alive() const;
  void check_peers() const;

  // The steps. False: it cannot be taken yet.
  bool begin(uint64_t number);
  bool reduce(uint64_t number);
  bool start_exchange(uint64_t number);
  bool finish_exchange(uint64_t number);
  bool start_gather(uint64_t number);
  bool finish_gather(uint64_t number);
  bool share(uint64_t number);
  bool finish();

  bool all_posted(uint64_t number) const;
  bool all_ended(Task& task);
  bool is_own_input(const Operation& operation, int slice) const;
  bool can_share(uint64_t number, const Task& task) const;
  bool has_result(const Task& task) const;
  bool is_input_free(uint64_t number, const Task& task) const;
  void reduce_on_host(const Task& task, const Range& range, const shm::ReduceOutput& output) const;
  void reduce_to_result(const Task& task) const;
  void reduce_columns(Task& task) const;
  void broadcast(Column& column, Task& task, const Range& range, int from_index, int root);
  std::byte* user_address(const Task& task, const Range& slice) const;

  const std::shared_ptr<const Hosts> hosts_;
  const int rank_;
  const std::shared_ptr<shm::PeerSockets> peers_;
  const std::chrono::milliseconds timeout_;
  const FailureHook on_failure_;
  const int num_spins_;
  std::function<void()> watch_ = [] {};
  shm::SharedMemory counters_memory_;
  std::optional<shm::ProgressCounters> counters_;
  shm::SharedRegions regions_;
  Staging staging_;

  std::atomic<int64_t> received_bytes_ = 0;
  std::atomic<uint64_t> num_ended_ = 0;  ///< collectives of Gloo; its threads count
  std::atomic<uint32_t> oldest_tag_ = 0;
  std::atomic<bool> stop_ = false, aborted_ = false;

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable changed_;
  std::deque<Task> issued_;  ///< that the thread has not taken yet
  int64_t num_unfinished_ = 0;
  std::optional<std::string> error_;

  // Of who takes the steps. Numbers of the last piece that has passed each step.
  std::deque<Task> tasks_;  ///< from finished_ + 1 on
  uint64_t posted_ = 0, reduced_ = 0, exchanging_ = 0, exchanged_ = 0, gathering_ = 0, gathered_ = 0,
           done_ = 0, finished_ = 0;
  uint64_t num_collected_ = 0;  ///< of Gloo's collectives
  std::vector<uint64_t> slot_users_;
  int next_slot_ = 0;

  bool closed_ = false;
  std::vector<Column> columns_;  ///< Gloo's threads use what is above
  std::mutex join_mutex_;
  std::thread thread_;
};

}  // namespace tessera::comm::hybrid

// Group: the collectives of the ranks of one host over memory that they have mapped of each other.
//
// What a stream does in a collective.
// A rank gives its stream the whole collective at once, and goes on: the device's own current stream, "my
// input is there" (posted), waits for the others' flags, copies from their memory or sums over all ranks'
// memory in rank order, "I have read" (done), and waits until the others have read. A rank only ever writes
// to its own memory. A gather is made of copies, which between devices are carried out by copy engines; a
// reduction is one kernel that reads the rank's slice of every rank's buffer and writes the result to where
// it is wanted, so that its bits depend on the ranks' order alone. An all-reduce reduces a slice a rank
// (reduced), then copies the others' slices.
//
// The mailbox of a device.
// Memory from allocate() is used in place. Other buffers pass in pieces through a mailbox of two halves. A
// half is written again when all ranks have read it, for which the stream waits, not the host.
//
// Watching a group.
// Streams wait for each other without the hosts, so each rank has a thread that looks at the flags and the
// sockets every few milliseconds. It fails the group when the process of a rank has ended whose part is
// missing, when a rank has left, when ranks have issued different operations, or after the timeout. Then
// streams are released ([Note: released] in flags.h), and every later call throws. The thread makes no call
// to the device.
//
// Why streams that wait do not block each other.
// What a stream is told to wait for needs of this rank only what the stream was given before: "posted" and
// "reduced" are written before anything of the others is waited for. So it does no harm that a driver holds
// up a call until the device is idle (cudaFree, a kernel that is loaded at its first launch), or that streams
// of a process share a queue of the hardware, in which a wait stands before work that was given later. That
// holds as long as ranks are processes, and all groups' operations have one order on all ranks, as with NCCL:
// [Note: one order on a device] in zero/gather/residency.h. It says nothing of hosts that wait for each
// other: where stage 3 agrees on a gather outside of a recorded order, and ranks use different parameters, a
// rank that a driver holds up until its stream's wait has ended, and one that waits for that rank's host,
// would wait until the timeout. CUDA_MODULE_LOADING=EAGER loads all kernels at the start.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/control/peer_sockets.h"
#include "comm/p2p/device.h"
#include "comm/p2p/flags.h"
#include "comm/p2p/peer_memory.h"
#include "comm/shm/reduce.h"
#include "comm/shm/shared_memory.h"
#include "comm/transport.h"

namespace tessera::comm::p2p {

struct GroupOptions {
  std::chrono::milliseconds timeout{0};  ///< of a collective
  FailureHook on_failure = {};           ///< called by the thread that watches; unset: none
  uint64_t first_number = 1;             ///< of an operation; for tests
};

/// A collective that the stream has been given.
struct Issued {
  uint64_t number = 0;
  MomentPtr end;
};

/// Owns its flags, memory, stream and thread; shares the device and the sockets with the groups that are made
/// of it. One thread at a time, except abort(). Every call may throw CommError: other ranks issued something
/// else, left, or are gone; and Error when the device refuses.
class Group {
 public:
  /// Collective. At most kMaxRanks ranks.
  Group(std::shared_ptr<Device> device, std::shared_ptr<shm::PeerSockets> peers, GroupOptions options);
  /// Closes it. Where the stream has not run out then, memory that it may use is not freed.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return peers_->rank(); }
  int size() const { return peers_->size(); }
  const std::shared_ptr<shm::PeerSockets>& peers() const { return peers_; }
  const std::shared_ptr<Device>& device() const { return device_; }

  /// Called about ten times a second while a call waits for other ranks; may throw, which ends it.
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }

  /// Collective, in one order over all groups with these sockets. `bytes` of device memory of each rank.
  std::shared_ptr<Region> allocate(int64_t bytes);

  // Collective. Pointers must stay valid until the end has passed.

  /// Slice rank() of the sum over ranks of `full`, (size() * numel), to `output`.
  Issued reduce_scatter(const void* full, DType dtype, int64_t numel, const shm::ReduceOutput& output,
                        uint32_t tag);
  /// `full`, (numel), becomes scale * the sum over ranks.
  Issued all_reduce(void* full, DType dtype, int64_t numel, double scale, uint32_t tag);
  /// Slice r of `full`, (size() * bytes), becomes rank r's `shard`.
  Issued all_gather(void* full, const void* shard, int64_t bytes, uint32_t tag);
  Issued broadcast(void* buffer, int64_t bytes, int root, uint32_t tag);
  Issued barrier(uint32_t tag);

  /// Whether the result is there.
  bool poll(const Issued& issued);
  /// Orders the current stream behind the result; false where that blocks and it has not come within
  /// `limit` (Moment::order_current).
  bool wait(const Issued& issued, std::chrono::milliseconds limit);

  /// Waits for what is in flight, or, after a failure, until the stream has run out, or for seconds.
  /// No collective may follow; poll() and wait() may.
  void close();

  /// The other ranks give up. Returns when the stream has run out, or after seconds. Never throws.
  void abort();

 private:
  using Location = PeerMemory::Location;
  struct Unfinished {
    uint64_t number;
    uint32_t tag;
    std::chrono::steady_clock::time_point deadline;
  };
  /// Keeps for ever what a stream that does not end may use.
  struct Kept;

  void set_up();

  // What the stream is given.
  uint64_t post(const Location& input, uint32_t tag);
  void write(Flags::Counter counter, uint64_t number);
  void wait_for_all(Flags::Counter counter, uint64_t number);
  void wait_for(Flags::Counter counter, uint64_t number, int rank);
  void copy(void* to, const void* from, int64_t bytes);
  void reduce(const Location& input, DType dtype, int64_t numel, const shm::ReduceOutput& output);
  void reduce_then_gather(const Location& input, uint64_t number, DType dtype, int64_t numel, double scale,
                          std::byte* output);
  Issued finish(uint64_t number, bool others_read_my_buffer);
  /// The half of the mailbox that is next, once all ranks have read it.
  Location next_half();
  Issued finish_half(uint64_t number);

  // What the hosts tell each other.
  void await_room(uint64_t number);
  /// Throws when ranks have issued different operations.
  void compare_keys();
  /// Throws when the group has failed on this rank …
  void check_own() const;
  /// … or a rank has left …
  void check_all_there() const;
  /// … or one has released flags, or has left without its part of an operation.
  void check_part_of_all(uint64_t number) const;
  void fail(const std::exception_ptr& cause, uint32_t tag);
  bool has_failed() const;
  /// Of all flags: [Note: released].
  void release();
  /// Lets the stream run out, and releases the flags for it if it has something to do; false when it does not
  /// within the limit.
  bool drain();

  void watch();
  void look_at_others();

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<shm::PeerSockets> peers_;
  const GroupOptions options_;
  std::function<void()> watch_ = [] {};

  shm::SharedMemory flags_memory_;
  std::shared_ptr<void> flags_registration_;
  std::optional<Flags> flags_;
  PeerMemory memory_;
  std::unique_ptr<Stream> stream_;
  static constexpr int kMailbox = 0;  ///< region
  int half_ = 0;                      ///< the one that is written next
  uint64_t half_used_[2] = {0, 0};    ///< the last operation that reads each half

  uint32_t upper_halves_[Flags::kNumCounters] = {};  ///< of this rank's flags, once the stream has come here
  uint64_t issued_ = 0;                              ///< the last operation's number
  bool has_ended_ = true;                            ///< false: the stream has not run out after a failure
  mutable std::mutex mutex_;                         ///< guards what follows
  std::deque<Unfinished> unfinished_;
  uint64_t checked_ = 0;   ///< whose keys have been compared
  uint64_t finished_ = 0;  ///< which all ranks had done while none had released
  std::exception_ptr failure_;
  bool stop_ = false;
  std::condition_variable stopped_;
  std::thread watcher_;  ///< last: it uses the rest
};

}  // namespace tessera::comm::p2p

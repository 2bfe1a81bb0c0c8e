// C10dCommunicator::Group: the state of one group that its works share with its communicator, so that a Work
// may outlive the communicator it came from.
#pragma once

#include "comm/c10d.h"

namespace tessera::comm {

/// One collective in flight. The buffers stay alive until it is done, whether or not anyone holds the Work.
struct Flight {
  int64_t number = 0;
  std::vector<C10dWork> parts;
  std::vector<at::Tensor> buffers;
  std::function<void()> finish;  ///< of Issued

  bool finished() const;
  /// The first part's failure, if any of them failed.
  std::optional<std::string> failure() const;
};

/// Owns the transport. One thread at a time.
class C10dCommunicator::Group : public std::enable_shared_from_this<Group> {
 public:
  /// `name`: the same on all ranks, and of this group alone.
  Group(std::shared_ptr<Family> family, GroupStore store, std::chrono::milliseconds timeout,
        std::string name);
  /// Collective. Connects, and returns when all ranks have: a rank that is done early must not leave while
  /// others still connect to each other.
  void open(const MakeTransport& make);

  Family& family() { return *family_; }
  Transport& transport() { return *transport_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  bool failed() const { return error_.has_value(); }

  using Issue = std::function<Issued(Transport&, uint32_t tag)>;
  WorkPtr run(Call call, std::vector<at::Tensor> buffers, const Issue& issue);
  using Allocate = std::function<at::Tensor(Transport&)>;
  at::Tensor allocate(Call call, const Allocate& allocate);
  std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                    std::chrono::milliseconds timeout);
  std::shared_ptr<Group> duplicate(std::string_view name);

  void wait(Flight& flight);
  void abort(std::string_view reason);

 private:
  FailureHook failure_reporter() const;
  void check_alive() const;
  /// Drops what has finished, and notices failures of works that nobody waits for.
  void reap();
  void wait_for_part(const Flight& flight, c10d::Work& part);
  /// Fails when a rank's process has ended that had not left in order.
  void check_all_alive(int64_t number);
  /// Compares with the other ranks that wait: lists of collectives, and who waits for whom.
  void check_stalled(int64_t number);
  void await_exchange(const std::string& prefix, int64_t number, std::chrono::milliseconds timeout);
  std::vector<std::string> read_exchange(const std::string& prefix, std::string_view label);
  [[noreturn]] void fail(int64_t number, const std::string& cause, const std::vector<int>& missing,
                         std::chrono::milliseconds timeout);
  [[noreturn]] void fail_with(std::string message);

  std::shared_ptr<Family> family_;
  GroupStore store_;
  std::shared_ptr<Ledger> ledger_;
  std::chrono::milliseconds timeout_;
  std::string name_;
  std::optional<std::string> error_;  ///< once set, every call throws it
  std::deque<std::shared_ptr<Flight>> in_flight_;
  uint32_t next_tag_ = 0;
  int64_t num_exchanges_ = 0;
  int64_t num_duplicates_ = 0;
  std::unique_ptr<Transport> transport_;  ///< last: its threads use the ledger
};

}  // namespace tessera::comm

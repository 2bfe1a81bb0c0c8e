#include "comm/shm.h"

#include <ATen/ops/from_blob.h>

#include "comm/explain.h"
#include "comm/rank_order_sum.h"
#include "comm/reported_memory.h"
#include "comm/shm/group.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// An operation under way. Nobody works on it but the ranks' own calls: testing it moves it on.
class ShmWork final : public c10d::Work {
 public:
  ShmWork(std::shared_ptr<shm::Group> group, uint64_t number, milliseconds timeout)
      : group_(std::move(group)),
        number_(number),
        timeout_(timeout),
        deadline_(steady_clock::now() + timeout) {}

  bool isCompleted() override {
    if (finished_ || error_) return true;
    try {
      finished_ = group_->test(number_);
      if (!finished_) check_deadline();
    } catch (...) {
      error_ = std::current_exception();
    }
    return finished_ || error_;
  }
  bool isSuccess() const override { return !error_; }
  std::exception_ptr exception() const override { return error_; }

  /// Throws after `limit` too, and can then be called again.
  bool wait(milliseconds limit) override {
    if (error_) std::rethrow_exception(error_);
    if (finished_) return true;
    const auto left =
        std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(deadline_ - steady_clock::now()));
    try {
      finished_ = group_->wait(number_, limit == kNoTimeout ? left : std::min(limit, left));
      if (!finished_) check_deadline();
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
    if (!finished_) throw CommError("not finished yet");
    return true;
  }

 private:
  void check_deadline() const {
    if (steady_clock::now() >= deadline_) throw CommError(str("timed out after ", name_duration(timeout_)));
  }

  const std::shared_ptr<shm::Group> group_;
  const uint64_t number_;
  const milliseconds timeout_;
  const steady_clock::time_point deadline_;
  bool finished_ = false;
  std::exception_ptr error_;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(std::shared_ptr<shm::Peers> peers, milliseconds timeout)
      : timeout_(timeout), group_(std::make_shared<shm::Group>(std::move(peers), timeout)) {}

  std::string_view name() const override { return "shm"; }
  bool wait_blocks() const override { return true; }

  Issued all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) override {
    return work(
        group_->all_gather(full.data_ptr(), shard.data_ptr(), static_cast<int64_t>(shard.nbytes()), tag));
  }

  Issued reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) override {
    return work(group_->reduce_scatter(full.data_ptr(), element_of(full), into.shard.numel(),
                                       {into.shard.data_ptr(), element_of(into.shard), into.scale, into.add},
                                       tag));
  }

  Issued all_reduce(const at::Tensor& full, double scale, uint32_t tag) override {
    return work(group_->all_reduce(full.data_ptr(), element_of(full), full.numel(), scale, tag));
  }

  Issued broadcast(const at::Tensor& buffer, int root, uint32_t tag) override {
    return work(group_->broadcast(buffer.data_ptr(), static_cast<int64_t>(buffer.nbytes()), root, tag));
  }

  Issued barrier(uint32_t tag) override { return work(group_->barrier(tag)); }

  at::Tensor allocate_symmetric(int64_t bytes) override { return allocate(bytes, /*common=*/false); }
  at::Tensor allocate_shared(int64_t bytes) override { return allocate(bytes, /*common=*/true); }

  at::Tensor peer_view(const at::Tensor& mine, int rank) override {
    const void* theirs = group_->peer_address(mine.data_ptr(), static_cast<int64_t>(mine.nbytes()), rank);
    if (theirs == nullptr) return {};
    return at::for_blob(const_cast<void*>(theirs), mine.sizes())
        .deleter([mine](void*) {})
        .options(mine.options())
        .make_tensor();
  }

  void abort() override { group_->abort(); }

  std::unique_ptr<Transport> duplicate(const GroupStore&, FailureHook) override {
    return std::make_unique<ShmTransport>(group_->peers(), timeout_);
  }

 private:
  std::vector<C10dWork> work(uint64_t number) {
    return {c10::make_intrusive<ShmWork>(group_, number, timeout_)};
  }

  at::Tensor allocate(int64_t bytes, bool common) {
    auto region = group_->allocate(bytes, common);
    void* data = region->of(group_->rank());
    return reported_memory(std::move(region), data, bytes, common ? group_->size() : 1);
  }

  const milliseconds timeout_;
  const std::shared_ptr<shm::Group> group_;
};

}  // namespace

std::unique_ptr<Transport> make_shm_transport(const GroupStore& store, int rank, int size,
                                              milliseconds timeout, milliseconds connect_timeout) {
  return std::make_unique<ShmTransport>(
      std::make_shared<shm::Peers>(store.under("shm"), rank, size, connect_timeout), timeout);
}

}  // namespace tessera::comm

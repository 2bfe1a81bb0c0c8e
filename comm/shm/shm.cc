#include "comm/shm/shm.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/memory/reported_memory.h"
#include "comm/shm/operation_queue.h"
#include "comm/torch_dtype.h"
#include "core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

DType dtype_of(const at::Tensor& tensor) { return from_torch(tensor.scalar_type()); }

class ShmTransport final : public Transport {
 public:
  ShmTransport(std::shared_ptr<shm::PeerSockets> peers, ShmOptions options)
      : options_(std::move(options)),
        queue_(std::make_shared<shm::OperationQueue>(std::move(peers), options_.timeout)) {}

  std::string_view name() const override { return "shm"; }
  bool wait_blocks() const override { return true; }

  PendingPtr all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) override {
    return pending(
        queue_->all_gather(full.data_ptr(), shard.data_ptr(), static_cast<int64_t>(shard.nbytes()), tag));
  }

  PendingPtr reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) override {
    return pending(queue_->reduce_scatter(full.data_ptr(), dtype_of(full), into.shard.numel(),
                                          {into.shard.data_ptr(), dtype_of(into.shard), into.scale, into.add},
                                          tag));
  }

  PendingPtr all_reduce(const at::Tensor& full, double scale, uint32_t tag) override {
    return pending(queue_->all_reduce(full.data_ptr(), dtype_of(full), full.numel(), scale, tag));
  }

  PendingPtr broadcast(const at::Tensor& buffer, int root, uint32_t tag) override {
    return pending(queue_->broadcast(buffer.data_ptr(), static_cast<int64_t>(buffer.nbytes()), root, tag));
  }

  PendingPtr barrier(uint32_t tag) override { return pending(queue_->barrier(tag)); }

  at::Tensor allocate_symmetric(int64_t bytes) override { return allocate(bytes, /*common=*/false); }
  at::Tensor allocate_shared(int64_t bytes) override { return allocate(bytes, /*common=*/true); }

  HostRank host_rank() const override { return {queue_->rank(), queue_->size()}; }

  void set_watch(std::function<void()> watch) override { queue_->set_watch(std::move(watch)); }

  at::Tensor peer_view(const at::Tensor& mine, int rank) override {
    const void* theirs = queue_->peer_address(mine.data_ptr(), static_cast<int64_t>(mine.nbytes()), rank);
    if (theirs == nullptr) return {};
    return at::for_blob(const_cast<void*>(theirs), mine.sizes())
        .deleter([mine](void*) {})
        .options(mine.options())
        .make_tensor();
  }

  void abort() override { queue_->abort(); }

  std::unique_ptr<Transport> duplicate(const GroupStore&, FailureHook) override {
    return std::make_unique<ShmTransport>(queue_->peers(), options_);
  }

  std::unique_ptr<Transport> split(const std::vector<int>& ranks, const GroupStore& store,
                                   FailureHook) override {
    ShmOptions options = options_;
    options.rank = place_of(ranks, options_.rank);
    options.size = static_cast<int>(ranks.size());
    options.numbers.clear();
    for (const int rank : ranks) options.numbers.push_back(queue_->peers()->number_of(rank));
    return make_shm_transport(store, options);
  }

 private:
  /// No thread works on the operation: asking for its end advances it.
  PendingPtr pending(uint64_t number) const {
    return std::make_unique<PendingCall>(
        [queue = queue_, number, timeout = options_.timeout,
         deadline = steady_clock::now() + options_.timeout](milliseconds limit) {
          const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
          if (limit.count() == 0 ? queue->poll(number)
                                 : queue->wait(number, std::clamp(left, milliseconds(0), limit)))
            return true;
          if (steady_clock::now() >= deadline) throw CommError("timed out after ", name_duration(timeout));
          return false;
        });
  }

  at::Tensor allocate(int64_t bytes, bool common) {
    auto region = queue_->allocate(bytes, common);
    void* data = region->address(queue_->rank());
    return reported_memory(std::move(region), data, bytes, common ? queue_->size() : 1);
  }

  const ShmOptions options_;
  const std::shared_ptr<shm::OperationQueue> queue_;
};

}  // namespace

std::unique_ptr<Transport> make_shm_transport(const GroupStore& store, const ShmOptions& options) {
  return std::make_unique<ShmTransport>(
      std::make_shared<shm::PeerSockets>(store.under("shm"), options.rank, options.size,
                                         options.connect_timeout, options.numbers),
      options);
}

}  // namespace tessera::comm

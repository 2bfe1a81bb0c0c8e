#include "comm/nccl/nccl.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <atomic>
#include <utility>

#include "comm/c10d_pending.h"
#include "comm/control/error_message.h"
#include "comm/nccl/nccl_plugin.h"
#include "core/cuda_plugin.h"
#include "core/error.h"

namespace tessera::comm {
namespace {

/// NCCL has no integers of 16 bits: their sums are made in 32.
at::Tensor summable(const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kShort) return tensor;
  const at::DisableRecordFunctionGuard silent;
  const at::NoGradGuard no_grad;
  return tensor.to(at::kInt);
}

// [Note: streams] ProcessGroupNCCL runs collectives on a stream of its own. Issuing one makes that stream
// wait for the current stream; a work's wait() makes the current stream wait for the collective, without
// blocking the thread. Between the two it keeps the tensors alive (as does PendingCollective), so the caching
// allocator cannot reuse their memory; after the wait, reuse on the current stream is ordered
// behind the collective. So one thread can have many collectives under way, and nothing on the host shows
// in which order the device runs them: see [Note: one order on a device] in zero/plan/collective_order.h for
// what that asks of a caller that uses more than one group.
class NcclTransport final : public Transport {
 public:
  NcclTransport(const GroupStore& store, int rank, int size, int device, std::chrono::milliseconds timeout)
      : rank_(rank), size_(size), device_(device), timeout_(timeout) {
    const auto make = TESSERA_RESOLVE(tessera_nccl_make_group);
    try {
      make(&store.c10d_store(), rank, size, device, timeout.count(), &group_);
    } catch (const std::exception& error) {
      throw CommError("rank ", rank, " cannot set up NCCL on cuda:", device, " (", error_message(error), ")");
    }
  }

  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;
  /// Without shutdown() c10d warns and aborts.
  ~NcclTransport() override {
    if (aborted_) return;
    try {
      group_->shutdown();
    } catch (const std::exception&) {
      // Everything that was waited for has succeeded.
    }
  }

  std::string_view name() const override { return "nccl"; }
  bool wait_blocks() const override { return false; }

  // NCCL gathers in place when the input is the rank's own slice of the output.
  PendingPtr all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t) override {
    at::Tensor output = plain_view(full, 0, full.numel());
    at::Tensor input = plain_view(shard, 0, shard.numel());
    return pending(group_->_allgather_base(output, input));
  }

  // And it scatters in place when the output is the rank's own slice of the input.
  PendingPtr reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t) override {
    const int64_t shard_numel = full.numel() / size_;
    at::Tensor input = summable(plain_view(full, 0, full.numel()));
    at::Tensor output = plain_view(input, rank_ * shard_numel, shard_numel);
    return pending(group_->_reduce_scatter_base(output, input), finish_reduction(output, into));
  }

  PendingPtr all_reduce(const at::Tensor& full, double scale, uint32_t) override {
    std::vector<at::Tensor> tensors{summable(plain_view(full, 0, full.numel()))};
    return pending(group_->allreduce(tensors), finish_reduction(tensors.front(), {full, scale}));
  }

  PendingPtr broadcast(const at::Tensor& buffer, int root, uint32_t) override {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{plain_view(buffer, 0, buffer.numel())};
    return pending(group_->broadcast(tensors, options));
  }

  // The wait of a barrier blocks the thread, unlike that of any other operation.
  PendingPtr barrier(uint32_t) override {
    c10d::BarrierOptions options;
    options.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device_));
    return pending(group_->barrier(options));
  }

  void abort() override {
    if (aborted_.exchange(true)) return;
    try {
      group_->abort();
    } catch (const std::exception&) {
      // The error that led to the abort is the one to show.
    }
  }

  std::unique_ptr<Transport> duplicate(const GroupStore& store, FailureHook) override {
    return std::make_unique<NcclTransport>(store, rank_, size_, device_, timeout_);
  }

  std::unique_ptr<Transport> split(const std::vector<int>& ranks, const GroupStore& store,
                                   FailureHook) override {
    return std::make_unique<NcclTransport>(store, place_of(ranks, rank_), static_cast<int>(ranks.size()),
                                           device_, timeout_);
  }

 private:
  static PendingPtr pending(C10dWork work, std::function<void()> finish = {}) {
    return std::make_unique<C10dPending>(std::vector<C10dWork>{std::move(work)}, /*wait_blocks=*/false,
                                         std::move(finish));
  }

  const int rank_;
  const int size_;
  const int device_;
  const std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Backend> group_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(const GroupStore& store, int rank, int size, int device,
                                               std::chrono::milliseconds timeout) {
  return std::make_unique<NcclTransport>(store, rank, size, device, timeout);
}

}  // namespace tessera::comm

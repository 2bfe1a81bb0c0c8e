#include "comm/simulated.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>

#include "comm/self.h"

namespace tessera::comm {
namespace {

/// `bytes` of zeros of which this rank is charged `share`: the memory itself belongs to nobody who counts.
at::Tensor zeros_charged_at(int64_t bytes, int64_t share) {
  const c10::Device cpu(c10::kCPU);
  auto memory = std::shared_ptr<std::byte[]>(new std::byte[static_cast<size_t>(bytes)]());
  void* data = memory.get();
  const auto report = [cpu](void* pointer, int64_t change) {
    if (c10::memoryProfilingEnabled()) c10::reportMemoryUsageToProfiler(pointer, change, 0, 0, cpu);
  };
  report(data, share);
  return at::for_blob(data, {bytes})
      .deleter([memory, share, report](void* freed) { report(freed, -share); })
      .options(at::TensorOptions().dtype(at::kByte))
      .make_tensor();
}

}  // namespace

at::Tensor SimulatedCommunicator::peer_view(const at::Tensor& mine, int) { return group_.one_host ? mine : at::Tensor(); }

at::Tensor SimulatedCommunicator::allocate_shared(int64_t bytes, std::string_view) {
  return group_.one_host ? zeros_charged_at(bytes, (bytes + group_.size - 1) / group_.size) : at::Tensor();
}

std::vector<std::string> SimulatedCommunicator::exchange(const std::string& value, std::string_view, std::chrono::milliseconds) {
  return std::vector<std::string>(static_cast<size_t>(group_.size), value);
}

std::shared_ptr<Communicator> SimulatedCommunicator::duplicate(std::string_view) {
  return std::make_shared<SimulatedCommunicator>(group_);
}

WorkPtr SimulatedCommunicator::do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view) {
  // Not the model's work: whoever listens to operators (zero/residency) must not see it.
  const at::DisableRecordFunctionGuard silent;
  const at::NoGradGuard no_grad;
  const int64_t numel = shard.numel(), before = group_.rank, after = group_.size - group_.rank - 1;
  at::Tensor mine = full.narrow(0, before * numel, numel);
  if (mine.data_ptr() != shard.data_ptr()) mine.copy_(shard);
  if (before > 0) full.narrow(0, 0, before * numel).view({before, numel}).copy_(shard);
  if (after > 0) full.narrow(0, (before + 1) * numel, after * numel).view({after, numel}).copy_(shard);
  return finished_work();
}

WorkPtr SimulatedCommunicator::do_reduce_scatter(const at::Tensor& full, const ReduceInto& into, std::string_view) {
  const int64_t numel = into.shard.numel();
  write_result(full.narrow(0, group_.rank * numel, numel), into);
  return finished_work();
}

WorkPtr SimulatedCommunicator::do_all_reduce(const at::Tensor& full, double scale, std::string_view) {
  write_result(full, {full, scale});
  return finished_work();
}

WorkPtr SimulatedCommunicator::do_broadcast(const at::Tensor&, int, std::string_view) { return finished_work(); }
void SimulatedCommunicator::do_barrier(std::string_view) {}

}  // namespace tessera::comm

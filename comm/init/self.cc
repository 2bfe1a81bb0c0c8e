#include "comm/init/self.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "comm/gloo/gloo.h"
#include "comm/memory/reported_memory.h"
#include "comm/transport.h"

namespace tessera::comm {
namespace {

/// Keeps a buffer as long as it would be in use.
class FinishedWork final : public Work {
 public:
  explicit FinishedWork(at::Tensor buffer = {}) : buffer_(std::move(buffer)) {}
  bool test() override { return true; }
  void wait() override { buffer_.reset(); }

 private:
  at::Tensor buffer_;
};

}  // namespace

WorkPtr finished_work() { return std::make_shared<FinishedWork>(); }

std::string_view SelfCommunicator::backend() const {
  if (group_.size == 1) return "self";
  return group_.one_host ? "simulated shm" : "simulated network";
}

at::Tensor SelfCommunicator::peer_view(const at::Tensor& mine, int) {
  return group_.one_host ? mine : at::Tensor();
}

at::Tensor SelfCommunicator::allocate_shared(int64_t bytes, std::string_view) {
  if (!group_.one_host) return {};
  auto memory = std::shared_ptr<std::byte[]>(new std::byte[static_cast<size_t>(bytes)]());
  void* data = memory.get();
  return reported_memory(std::move(memory), data, bytes, group_.size);
}

std::vector<std::string> SelfCommunicator::exchange(const std::string& value, std::string_view,
                                                    std::chrono::milliseconds) {
  return std::vector<std::string>(static_cast<size_t>(group_.size), value);
}

std::shared_ptr<Communicator> SelfCommunicator::duplicate(std::string_view) {
  return std::make_shared<SelfCommunicator>(group_);
}

std::shared_ptr<Communicator> SelfCommunicator::split(const std::vector<int>& ranks, std::string_view) {
  SimulatedGroup part = group_;
  part.rank = place_of(ranks, group_.rank);
  part.size = static_cast<int>(ranks.size());
  return std::make_shared<SelfCommunicator>(part);
}

WorkPtr SelfCommunicator::do_all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view) {
  // The copies are ours, not the model's: listeners to operators (zero/gather/residency) must not see them.
  const at::DisableRecordFunctionGuard silent;
  const at::NoGradGuard no_grad;
  const int64_t numel = shard.numel(), before = group_.rank, after = group_.size - group_.rank - 1;
  at::Tensor mine = full.narrow(0, before * numel, numel);
  if (mine.data_ptr() != shard.data_ptr()) mine.copy_(shard);
  if (before > 0) full.narrow(0, 0, before * numel).view({before, numel}).copy_(shard);
  if (after > 0) full.narrow(0, (before + 1) * numel, after * numel).view({after, numel}).copy_(shard);
  return finished_work();
}

WorkPtr SelfCommunicator::do_reduce_scatter(const at::Tensor& full, const ReduceInto& into,
                                            std::string_view) {
  const at::DisableRecordFunctionGuard silent;
  const int64_t numel = into.shard.numel();
  write_result(full.narrow(0, group_.rank * numel, numel), into);
  return std::make_shared<FinishedWork>(buffers_reductions() && full.is_cpu()
                                            ? reduction_buffer(static_cast<int64_t>(full.nbytes()))
                                            : at::Tensor());
}

WorkPtr SelfCommunicator::do_all_reduce(const at::Tensor& full, double scale, std::string_view) {
  write_result(full, {full, scale});
  return finished_work();
}

WorkPtr SelfCommunicator::do_broadcast(const at::Tensor&, int, std::string_view) { return finished_work(); }

}  // namespace tessera::comm

#include "comm/labelled.h"

#include <utility>

#include "core/str.h"

namespace tessera::comm {

LabelledCommunicator::LabelledCommunicator(CommunicatorPtr group, std::string suffix)
    : Communicator(group->device()), group_(std::move(group)), suffix_(std::move(suffix)) {}

std::string LabelledCommunicator::with_suffix(std::string_view label) const { return str(label, suffix_); }

at::Tensor LabelledCommunicator::allocate_symmetric(int64_t bytes, at::Device device,
                                                    std::string_view label) {
  return group_->allocate_symmetric(bytes, device, with_suffix(label));
}

at::Tensor LabelledCommunicator::allocate_shared(int64_t bytes, std::string_view label) {
  return group_->allocate_shared(bytes, with_suffix(label));
}

std::vector<std::string> LabelledCommunicator::exchange(const std::string& value, std::string_view label,
                                                        std::chrono::milliseconds timeout) {
  return group_->exchange(value, with_suffix(label), timeout);
}

CommunicatorPtr LabelledCommunicator::duplicate(std::string_view name) {
  return group_->duplicate(with_suffix(name));
}

CommunicatorPtr LabelledCommunicator::duplicate_for_exchange(std::string_view name) {
  return group_->duplicate_for_exchange(with_suffix(name));
}

CommunicatorPtr LabelledCommunicator::split(const std::vector<int>& ranks, std::string_view name) {
  return group_->split(ranks, with_suffix(name));
}

WorkPtr LabelledCommunicator::do_all_gather(const at::Tensor& full, const at::Tensor& shard,
                                            std::string_view label) {
  return group_->all_gather(full, shard, with_suffix(label));
}

WorkPtr LabelledCommunicator::do_reduce_scatter(const at::Tensor& full, const ReduceInto& into,
                                                std::string_view label) {
  return group_->reduce_scatter(full, into, with_suffix(label));
}

WorkPtr LabelledCommunicator::do_all_reduce(const at::Tensor& full, double scale, std::string_view label) {
  return group_->all_reduce(full, with_suffix(label), scale);
}

WorkPtr LabelledCommunicator::do_broadcast(const at::Tensor& buffer, int root, std::string_view label) {
  return group_->broadcast(buffer, root, with_suffix(label));
}

void LabelledCommunicator::barrier(std::string_view label) { group_->barrier(with_suffix(label)); }

}  // namespace tessera::comm

// What autograd saves: see recording.h.
#include <algorithm>
#include <utility>

#include "activations/recording.h"
#include "core/error.h"
#include "zero/gather/cast_tracker.h"
#include "zero/operators/tap.h"

namespace tessera::activations {

std::shared_ptr<SavedTensor> Recording::save(const at::Tensor& tensor, RunningOperator* running) {
  auto saved = std::make_shared<SavedTensor>(shared_from_this(), tensor);
  // Casts of sharded parameters are dropped and made anew with their unit.
  if (!supported(tensor) || is_parameter(tensor) || zero::find_cast(*storage_of(tensor)) != nullptr)
    return saved;
  const std::lock_guard lock(mutex_);
  ValuePtr value = find(tensor);
  const bool may_be_result = running != nullptr && running->recording.get() == this &&
                             (!value || std::any_of(running->written.begin(), running->written.end(),
                                                    [&](const at::Tensor& written) {
                                                      return storage_of(written) == storage_of(tensor);
                                                    }));
  if (may_be_result) {
    running->saved_results.push_back({saved, tensor.unsafeGetTensorImpl()});
  } else {
    settle(*saved, value ? value : remember(tensor), tensor);
  }
  return saved;
}

void Recording::count_kept(const at::Tensor& tensor) {
  ++counts_.num_kept;
  if (counted_.insert(storage_of(tensor)).second)
    counts_.kept_bytes += static_cast<int64_t>(storage_of(tensor)->nbytes());
}

void Recording::settle(SavedTensor& saved, const ValuePtr& value, const at::Tensor& tensor) {
  saved.value_ = value;
  const bool kept_already = memory_is_kept(value->storage);
  const bool small = value->bytes < options_.min_bytes;
  if (!value->kept.defined() && !kept_already && !small && leaves_memory(value, tensor)) {
    saved.tensor_.reset();
    return;
  }
  if (!value->kept.defined()) hold(value, tensor);
  saved.tensor_ = alias_of(tensor);
  count_kept(tensor);
}

bool Recording::leaves_memory(const ValuePtr& value, const at::Tensor& tensor) {
  const Fate fate = value->on_disk ? Fate::kOffload : decide(value);
  if (fate == Fate::kKeep) return false;
  if (verifying_)
    take_digest(*value, tensor);  // also where an operator that read it has: it may differ by now
  if (fate == Fate::kOffload) return value->on_disk || offload(value, tensor);
  if (!std::exchange(value->dropped, true)) {
    counts_.dropped_bytes += static_cast<int64_t>(tensor.nbytes());
    ++counts_.num_dropped;
  }
  return true;
}

/// False where the tensor stays in memory. An error is thrown when the forward has ended: libtorch swallows
/// what is thrown while an operator ends.
bool Recording::offload(const ValuePtr& value, const at::Tensor& tensor) {
  const bool plain = tensor.is_cpu() && !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
  if (!spill_ || failure_ || !plain) return false;
  c10::StorageImpl* const storage = storage_of(tensor);
  OnDisk& known = on_disk_[storage];
  std::shared_ptr<SpillBlock> block = known.block.lock();
  const auto written = last_write_.find(storage);
  const bool same = block && !known.storage.expired() && known.version == tensor._version() &&
                    (written == last_write_.end() || written->second <= known.made_at);
  if (!same) {
    try {
      block = spill_->write({static_cast<const std::byte*>(storage->data()), storage->nbytes()});
    } catch (const Error&) {
      failure_ = std::current_exception();
      return false;
    }
    known = {block, tensor.storage().getWeakStorageImpl(), static_cast<uint32_t>(tensor._version()), clock_};
    counts_.offloaded_bytes += static_cast<int64_t>(storage->nbytes());
    ++counts_.num_offloaded;
  }
  value->on_disk.emplace(std::move(block), tensor);
  value->depth = 0;
  value->producer.reset();
  disown(*value);
  return true;
}

Fate Recording::decide(const ValuePtr& value) {
  if (options_.kind == PolicyOptions::Kind::kOffload)
    return value->is_result && value->bytes >= options_.min_offload_bytes ? Fate::kOffload : Fate::kKeep;
  const bool in_block = block_ >= 0 && value->segment == segment_;
  return can_be_made(value, /*cheaply=*/!in_block) ? Fate::kRecompute : Fate::kKeep;
}

/// Whether all that leads to the value is kept already.
bool Recording::can_be_made(const ValuePtr& value, bool cheaply) const {
  std::vector<const Value*> wanted{value.get()};
  std::unordered_set<const Value*> seen;
  while (!wanted.empty()) {
    const Value* next = wanted.back();
    wanted.pop_back();
    if (next->available() || !seen.insert(next).second) continue;
    if (!next->producer) return false;
    if (cheaply && (!next->producer->facts->cheap || seen.size() > kMaxCheapDepth)) return false;
    for (const Call::Input& input : next->producer->inputs) wanted.push_back(input.value.get());
  }
  return true;
}

at::Tensor Recording::make_again(const ValuePtr& value) {
  const std::lock_guard lock(mutex_);
  const zero::RepeatedOperators of_the_forward;
  at::Tensor tensor = make(value, counts_.work);
  if (value->recomputed) {  // others may be made of it, after a backward has written it
    value->handed_out = true;
    value->version = tensor._version();
    const std::lock_guard kept_lock(kept_mutex_);
    kept_[storage_of(tensor)].push_back(value);
  }
  return tensor;
}

// ------------------------------------------------------------------------------------- SavedTensor

SavedTensor::SavedTensor(std::shared_ptr<Recording> recording, const at::Tensor& tensor)
    : recording_(std::move(recording)),
      tensor_(alias_of(tensor)),
      counter_(tensor.is_inference() ? c10::VariableVersion()
                                     : tensor.unsafeGetTensorImpl()->version_counter()),
      version_(tensor.is_inference() ? 0 : tensor._version()) {}

at::Tensor SavedTensor::unpack() {
  if (counter_.enabled() && counter_.current_version() != version_)
    throw Error("one of the tensors that backward needs was written in place since the forward: a tensor ",
                "of version ", version_, " is at version ", counter_.current_version(), " now");
  return tensor_.defined() ? tensor_ : recording_->make_again(value_);
}

}  // namespace tessera::activations

#include "activations/recording.h"

#include <ATen/Context.h>

#include <algorithm>
#include <utility>

#include "core/str.h"

namespace tessera::activations {
Recording::Recording(PolicyOptions options) : options_(std::move(options)) {
  choose_verifying();
  if (options_.directory.empty()) return;
  spill_ = std::make_shared<TensorSpill>(
      TensorSpill::Options{.directory = options_.directory,
                           .buffer_bytes = options_.buffer_bytes,
                           .purpose = str("saved tensors of ", options_.owner)});
}

void Recording::choose_verifying() {
  verifying_ = options_.verify > 0 && (passes_ < options_.verify || passes_ % kVerifiedEvery == 0);
}

void Recording::take_digest(Value& value, const at::Tensor& tensor) {
  // oneDNN's workspace for backward has gaps that nothing writes.
  const bool is_workspace = tensor.scalar_type() == at::kByte && value.producer &&
                            value.producer->facts->name == "aten::mkldnn_rnn_layer";
  if (is_workspace) return;
  value.digest = digest_of(tensor);
}

// --------------------------------------------------------------------------------- what a tensor is

ValuePtr Recording::find(const at::Tensor& tensor) const {
  return find(tensor, tensor.unsafeGetTensorImpl());
}

/// `key`: the tensor that `tensor` is, or is an alias of.
ValuePtr Recording::find(const at::Tensor& tensor, const void* key) const {
  const auto found = known_.find(key);
  if (found == known_.end()) return nullptr;
  ValuePtr value = found->second.get();
  if (!value || value->alive.expired() || value->made_version != tensor._version()) return nullptr;
  const void* storage = storage_of(tensor);
  if (value->storage != storage) return nullptr;  // set_data()
  if (is_shared_memory(tensor)) return nullptr;   // since it was made
  const auto written = last_write_.find(storage);
  return written == last_write_.end() || written->second <= value->made_at ? value : nullptr;
}

ValuePtr Recording::remember(const at::Tensor& tensor) {
  auto value = std::make_shared<Value>();
  value->alive = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr());
  value->tensor = tensor.unsafeGetTensorImpl();
  value->made_version = tensor._version();
  value->storage = storage_of(tensor);
  value->bytes = static_cast<int64_t>(storage_of(tensor)->nbytes());
  value->made_at = clock_;
  value->segment = segment_;
  known_[value->tensor] = {value, value};
  if (known_.size() > swept_size_) sweep();
  return value;
}

void Recording::sweep() {
  std::erase_if(known_, [](const auto& item) {
    const ValuePtr value = item.second.get();
    return !value || value->alive.expired();
  });
  const std::lock_guard lock(kept_mutex_);
  std::erase_if(kept_, [](const auto& item) {
    return std::all_of(item.second.begin(), item.second.end(),
                       [](const std::weak_ptr<Value>& value) { return value.expired(); });
  });
  swept_size_ = std::max<size_t>(256, 2 * known_.size());
}

void Recording::hold(const ValuePtr& value, const at::Tensor& tensor) {
  keep(*value, tensor);
  {
    const std::lock_guard lock(kept_mutex_);
    kept_[value->storage].push_back(value);
  }
  disown(*value);
}

void Recording::disown(const Value& value) {
  const auto found = known_.find(value.tensor);
  if (found != known_.end() && found->second.owned.get() == &value) found->second.owned.reset();
}

bool Recording::memory_is_kept(const void* storage) const {
  const auto found = kept_.find(storage);
  if (found == kept_.end()) return false;
  return std::any_of(found->second.begin(), found->second.end(), [&](const std::weak_ptr<Value>& weak) {
    const ValuePtr value = weak.lock();
    return value && value->kept.defined() && storage_of(value->kept) == storage;
  });
}

/// What an operator reads. Held where recomputation starts from it: what comes from outside of the forward
/// (inputs, buffers: there is memory of it anyway), and what goes into a block.
ValuePtr Recording::input_value(const at::Tensor& tensor) {
  if (is_parameter(tensor)) {
    auto value = std::make_shared<Value>();
    value->made_version = tensor._version();
    keep(*value, tensor);
    return value;
  }
  ValuePtr value = find(tensor);
  const bool from_outside = !value;
  const bool starts_here = from_outside && (!tensor.requires_grad() || block_ >= 0);
  // See recording.h: memory of others.
  if (starts_here &&
      (is_shared_memory(tensor) || static_cast<int64_t>(tensor.nbytes()) <= options_.min_bytes))
    return copied_value(tensor);
  if (from_outside) value = remember(tensor);
  if (verifying_ && !value->digest) take_digest(*value, tensor);
  if (value->available()) return value;
  const bool into_block = block_ >= 0 && (value->segment != segment_ || !value->producer);
  if (starts_here && tensor.is_cpu() && !value->digest) take_digest(*value, tensor);
  if (into_block || starts_here) hold(value, tensor);
  return value;
}

ValuePtr Recording::copied_value(const at::Tensor& tensor) {
  auto value = std::make_shared<Value>();
  take_digest(*value, tensor);
  std::weak_ptr<Value>& known = copies_[{value->digest->hash, tensor.strides().vec()}];
  if (ValuePtr before = known.lock()) return before;
  value->made_version = tensor._version();
  value->bytes = static_cast<int64_t>(tensor.nbytes());
  value->made_at = clock_;
  value->segment = segment_;
  keep(*value, copy_of(tensor));
  value->storage = storage_of(value->kept);
  known = value;
  return value;
}

// ----------------------------------------------------------------------------------- the operators

/// A parameter that began the block and is read again: the block is called again.
void Recording::enter_block(int block, int parameter) {
  const std::lock_guard lock(mutex_);
  if (block >= options_.num_blocks) block = -1;
  if (block == block_ && (block < 0 || parameter != block_entry_)) return;
  ++segment_;
  block_ = block;
  block_entry_ = parameter;
}

bool Recording::wants(const OperatorFacts& facts) const {
  return options_.kind != PolicyOptions::Kind::kOffload && facts.repeatable && (facts.cheap || block_ >= 0) &&
         !options_.keep.contains(facts.name);
}

void Recording::add_input(RunningOperator& running, size_t argument, int64_t position,
                          const at::Tensor& tensor) {
  if (!supported(tensor) || is_being_written(tensor)) {
    running.call.reset();
    return;
  }
  const bool written = static_cast<int>(argument) == running.facts->in_place_argument;
  if (written && running.facts->overwrites) {
    running.call->overwritten = {tensor.sizes().vec(), tensor.strides().vec(), tensor.options()};
    return;
  }
  ValuePtr value = input_value(tensor);
  // Nothing can bring back what is about to be overwritten.
  if (written && (!value->producer && !value->recomputed)) running.call.reset();
  if (running.call)
    running.call->inputs.push_back(
        {argument, position, std::move(value), tensor.unsafeGetTensorImpl()->is_wrapped_number()});
}

void Recording::operator_started(RunningOperator& running, c10::ArrayRef<const c10::IValue> inputs) {
  const std::lock_guard lock(mutex_);
  const OperatorFacts& facts = *running.facts;
  running.started_at = ++clock_;
  for (at::Tensor& tensor : written_tensors(facts, inputs))
    if (tensor.has_storage()) running.written.push_back(std::move(tensor));
  if (!facts.composite && wants(facts) && inputs.size() == facts.num_arguments) {
    running.call = std::make_shared<Call>();
    running.call->facts = &facts;
    const KernelSettings settings = current_settings();
    if (!settings_ || *settings_ != settings) settings_ = std::make_shared<const KernelSettings>(settings);
    running.call->settings = settings_;
    running.call->arguments.assign(inputs.begin(), inputs.end());
    if (facts.training_argument >= 0 && inputs[facts.training_argument].toBool())
      for (const int statistic : {0, 1})
        running.call->arguments[facts.first_statistic + statistic] = c10::IValue();
    for (size_t i = 0; i < inputs.size() && running.call; ++i) {
      c10::IValue& argument = running.call->arguments[i];
      const c10::IValue given = argument;
      if (given.isTensor()) {
        argument = c10::IValue();
        if (!given.toTensor().defined()) continue;
        if (running.call->device.is_cpu())
          running.call->device = given.toTensor().device();  // not a number's
        add_input(running, i, -1, given.toTensor());
      } else if (given.isDevice()) {
        running.call->device = given.toDevice();
      } else if (given.isTensorList() || given.isOptionalTensorList()) {
        const auto items = given.toListRef();
        bool any = false;
        for (size_t k = 0; k < items.size() && running.call; ++k) {
          if (!items[k].isTensor() || !items[k].toTensor().defined()) continue;
          any = true;
          add_input(running, i, static_cast<int64_t>(k), items[k].toTensor());
        }
        const auto size = static_cast<int64_t>(items.size());
        if (any && running.call) running.call->arguments[i] = given.isTensorList() ? size : -size;
      }
    }
    if (running.call && facts.adds_in_any_order_on_cuda && running.call->device.is_cuda() &&
        !at::globalContext().deterministicAlgorithms())
      running.call.reset();
    if (running.call && facts.random) remember_generator(*running.call);
  }
  for (const at::Tensor& tensor : running.written) copy_before_writing(tensor);
  if (!facts.composite) begin_writing(running);
}

void Recording::begin_writing(RunningOperator& running) {
  for (const at::Tensor& tensor : running.written) running.marked.push_back(storage_of(tensor));
  being_written_.insert(being_written_.end(), running.marked.begin(), running.marked.end());
}

/// The tensors may have other storages by now (set_()).
void Recording::end_writing(RunningOperator& running) {
  for (const void* storage : running.marked)
    being_written_.erase(std::find(being_written_.begin(), being_written_.end(), storage));
  running.marked.clear();
}

bool Recording::is_being_written(const at::Tensor& tensor) const {
  return std::find(being_written_.begin(), being_written_.end(), storage_of(tensor)) != being_written_.end();
}

/// The thread that has mutex_ may wait for another rank, and ranks may be threads. So it is taken only where
/// the tensor is kept here.
void Recording::written_elsewhere(const std::vector<at::Tensor>& tensors) {
  const auto keeps = [&](const at::Tensor& tensor) {
    const std::lock_guard lock(kept_mutex_);
    const auto found = kept_.find(storage_of(tensor));
    return found != kept_.end() &&
           !std::all_of(found->second.begin(), found->second.end(),
                        [](const std::weak_ptr<Value>& value) { return value.expired(); });
  };
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.has_storage()) continue;
    if (keeps(tensor)) {
      const std::lock_guard lock(mutex_);
      copy_before_writing(tensor);
    }
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock() && !known_.empty()) last_write_[storage_of(tensor)] = ++clock_;
  }
}

/// See [Note: written in place].
void Recording::copy_before_writing(const at::Tensor& tensor) {
  std::vector<std::weak_ptr<Value>> values;
  {
    const std::lock_guard lock(kept_mutex_);
    const auto found = kept_.find(storage_of(tensor));
    if (found == kept_.end()) return;
    values = std::move(found->second);
    kept_.erase(found);
  }
  for (const std::weak_ptr<Value>& weak : values) {
    const ValuePtr value = weak.lock();
    if (!value || !value->kept.defined() || storage_of(value->kept) != storage_of(tensor)) continue;
    value->kept = copy_of(value->kept);
    value->version = value->kept._version();
  }
}

/// Views and the tensors they are views of are no longer known: see [Note: written in place].
void Recording::note_written(RunningOperator& running) {
  for (const at::Tensor& tensor : running.written) {
    const ValuePtr value = running.facts->composite ? find(tensor) : nullptr;
    if (value && value->made_at > running.started_at) continue;  // by an operator that this one called
    last_write_[storage_of(tensor)] = ++clock_;
  }
}

void Recording::operator_ended(RunningOperator& running, const std::vector<c10::IValue>& results) {
  const std::lock_guard lock(mutex_);
  ++clock_;
  end_writing(running);
  note_written(running);
  if (!running.facts->composite) {
    const std::vector<at::Tensor> tensors = flatten(results);
    if (running.call) running.call->outputs.resize(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!supported(tensors[i]) || is_parameter(tensors[i])) continue;
      // If an operator is not known, the operators that it called tell nothing about it.
      const ValuePtr known = find(tensors[i]);
      if (known && (running.facts->repeatable || known->made_at <= running.started_at)) continue;
      add_result(running, tensors[i], i);
    }
  }
  for (RunningOperator::Result& result : running.saved_results) {
    const at::Tensor tensor = result.saved->tensor_;
    const ValuePtr value = find(tensor, result.tensor);
    if (value)
      settle(*result.saved, value, tensor);
    else
      count_kept(tensor);
  }
}

void Recording::add_result(RunningOperator& running, const at::Tensor& tensor, size_t index) {
  const ValuePtr value = remember(tensor);
  value->is_result = true;
  if (!running.call || is_shared_memory(tensor)) return;
  for (const Call::Input& input : running.call->inputs)
    value->depth = std::max(value->depth, input.value->depth + 1);
  if (value->depth > kMaxCheapDepth && block_ < 0) return;
  value->producer = running.call;
  running.call->outputs[index] = value;
}

// ------------------------------------------------------------------------------------ between passes

/// What recomputation starts from is copied before it is written until backward is over: kept_ stays.
void Recording::start_anew() {
  known_.clear();
  sweep();
  copies_.clear();
  counted_.clear();
  last_write_.clear();
  on_disk_.clear();
  ++segment_;
  block_ = block_entry_ = -1;
  choose_verifying();
}

void Recording::begin_forward() {
  const std::lock_guard lock(mutex_);
  if (counts_.num_kept > 0 || counts_.num_dropped > 0) return;
  start_anew();
}

void Recording::end_pass() {
  const std::lock_guard lock(mutex_);
  const Work work = counts_.work;
  last_ = std::exchange(counts_, Counts());
  counts_.work = work;
  ++passes_;
  start_anew();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

Counts Recording::counts() const {
  const std::lock_guard lock(mutex_);
  Counts counts = last_;
  counts.work = counts_.work;
  return counts;
}

}  // namespace tessera::activations

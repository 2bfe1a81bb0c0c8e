#include "zero/deferred/recorder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <set>

#include "core/check.h"
#include "zero/deferred/closed_storage.h"
#include "zero/operators/per_operator.h"

namespace tessera::zero::deferred {
namespace {

constexpr int64_t kSmallBytes = 256 << 10;     ///< of one tensor that is computed at once
constexpr int64_t kAllSmallBytes = 8LL << 20;  ///< of all of them that live at a time

constinit thread_local Recorder* current = nullptr;
const c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::DeferredInit);

void hear(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (current == nullptr) return op.redispatchBoxed(keys & kBelow, stack);
  current->handle(op, keys & kBelow, *stack);
}

/// Is called once in a process, when the first model is made without memory.
void register_fallback() {
  [[gnu::used]] static torch::Library* const library = [] {
    auto* made =
        new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::DeferredInit, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&hear>());
    return made;
  }();
}

at::Tensor shares_storage(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(
      impl->shallow_copy_and_detach(tensor.is_inference() ? c10::VariableVersion(0) : impl->version_counter(),
                                    /*allow_tensor_metadata_change=*/false));
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !tensor.is_meta() && !tensor.is_nested();
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.itemsize());
}

bool covers_storage(const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 &&
         bytes_of(tensor) == static_cast<int64_t>(tensor.storage().nbytes()) &&
         tensor.is_non_overlapping_and_dense();
}

at::Tensor on_meta(const at::Tensor& tensor) {
  at::Tensor meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

/// "cuda" is the current device of the kind, as it is for libtorch's operators.
c10::Device with_index(c10::Device device) {
  if (device.has_index() || device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

/// Returns a tensor like the meta tensor, on the device, without memory.
at::Tensor without_memory(const at::Tensor& meta, c10::Device device) {
  int64_t numel = meta.numel() == 0 ? 0 : 1;
  for (int64_t dim = 0; dim < meta.dim() && numel > 0; ++dim)
    numel += (meta.size(dim) - 1) * meta.stride(dim);
  c10::Storage storage = storage_without_memory(static_cast<size_t>(numel) * meta.itemsize(), device);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, std::nullopt, device)),
      meta.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  return tensor;
}

}  // namespace

/// One call of an operator.
struct Recorder::Call {
  Call(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack)
      : op(op), traits(PerOperator<OperatorTraits>::of(op)), below(below), stack(stack) {
    const size_t num = op.schema().arguments().size();
    first = stack.size() - num;
    for (size_t i = 0; i < num; ++i)
      plain = visit_tensors(
                  stack[first + i],
                  [&](const at::Tensor& tensor) { tensors.push_back({tensor, static_cast<int>(i)}); }) &&
              plain;
  }
  struct Argument {
    at::Tensor tensor;
    int index;
  };
  c10::Device device() const {
    if (traits.device >= 0 && stack[first + traits.device].isDevice())
      return with_index(stack[first + traits.device].toDevice());
    for (const Argument& argument : tensors)
      if (argument.tensor.dim() > 0) return argument.tensor.device();
    return tensors.empty() ? c10::Device(c10::kCPU) : tensors[0].tensor.device();
  }
  bool writes(const Argument& argument) const { return traits.written[argument.index]; }
  torch::jit::Stack arguments() const { return {stack.begin() + static_cast<int64_t>(first), stack.end()}; }

  const c10::OperatorHandle& op;
  const OperatorTraits& traits;
  const c10::DispatchKeySet below;
  torch::jit::Stack& stack;
  size_t first = 0;
  bool plain = true;  // no argument may hide tensors
  std::vector<Argument> tensors;
};

Recorder::Recorder(OperatorLog& log)
    : log_(log), outer_((register_fallback(), current)), hear_operators_(c10::DispatchKey::DeferredInit) {
  current = this;
}

Recorder::~Recorder() {
  current = outer_;
  for (const auto& small : small_)
    if (const auto storage = small.second.storage.lock()) unwatch(c10::Storage(storage));
}

void Recorder::handle(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack) {
  const Call call(op, below, stack);
  const auto all_plain = [&] {
    return call.plain && std::all_of(call.tensors.begin(), call.tensors.end(),
                                     [](const Call::Argument& one) { return is_plain(one.tensor); });
  };
  switch (call.traits.kind) {
    case OperatorKind::kComposite: return op.redispatchBoxed(below, &stack);
    case OperatorKind::kView: return run_as_it_is(call);  // reads no memory
    case OperatorKind::kResize: return resize(call);
    case OperatorKind::kOpaque: return run_now(call);
    case OperatorKind::kUninitialized: return make_uninitialized(call);
    case OperatorKind::kCompute: break;
  }
  if (below.has_any(c10::autocast_dispatch_keyset)) return op.redispatchBoxed(below, &stack);
  if (!all_plain() || needs_now(call)) return run_now(call);
  const auto shapes = infer(call);
  if (!shapes) return run_now(call);
  int64_t output_bytes = 0;
  for (const at::Tensor& shape : *shapes)
    if (shape.defined()) output_bytes += bytes_of(shape);
  if (may_run_now(call, output_bytes)) {
    run_as_it_is(call);
    return call.traits.only_writes ? void() : count_small(stack);
  }
  record(call, *shapes);
}

void Recorder::run_as_it_is(const Call& call) {
  std::vector<c10::Storage> watched;  // the operator itself takes pointers
  for (const Call::Argument& argument : call.tensors)
    if (argument.tensor.has_storage() && is_watched(argument.tensor.storage()))
      watched.push_back(argument.tensor.storage());
  const c10::impl::ExcludeDispatchKeyGuard at_once(c10::DispatchKey::DeferredInit);
  call.op.redispatchBoxed(call.below, &call.stack);
  for (const c10::Storage& storage : watched) watch(storage);
}

/// Whether others than operators may write into the tensor's memory.
bool Recorder::is_exposed(const at::Tensor& tensor) const {
  if (const int entry = log_.find(tensor); entry >= 0) return log_.is_exposed(entry);
  if (tensor.storage().nbytes() == 0) return false;
  const auto small = small_.find(tensor.storage().unsafeGetStorageImpl());
  return small == small_.end() || !is_watched(tensor.storage());
}

/// Autograd has to see it, or it writes memory that may be read without an operator.
bool Recorder::needs_now(const Call& call) const {
  const bool differentiable = at::GradMode::is_enabled() && call.below.has_any(c10::autograd_dispatch_keyset);
  return std::any_of(call.tensors.begin(), call.tensors.end(), [&](const Call::Argument& argument) {
    return (differentiable && argument.tensor.requires_grad()) ||
           (call.writes(argument) && is_exposed(argument.tensor));
  });
}

/// Computes what the operator reads, then runs it.
void Recorder::run_now(const Call& call) {
  std::vector<Opened> opened;
  for (const Call::Argument& argument : call.tensors) {
    const int entry = log_.find(argument.tensor);
    if (entry < 0) continue;
    log_.compute(entry, /*to_write=*/call.writes(argument));
    opened.emplace_back(log_.entry(entry).storage);
  }
  if (!call.plain)
    for (int entry = 0; entry < log_.num_entries(); ++entry) log_.compute(entry, /*to_write=*/true);
  if (!call.traits.random || call.device().is_meta()) return run_as_it_is(call);
  log_.draw_now(stream_of(call), [&] { run_as_it_is(call); });
}

/// Meta tensors like the results; nothing if only running the operator can tell.
std::optional<std::vector<at::Tensor>> Recorder::infer(const Call& call) const {
  torch::jit::Stack stack;
  std::vector<std::pair<at::Tensor, at::Tensor>> outs;
  for (size_t i = call.first; i < call.stack.size(); ++i)
    stack.push_back(map_tensors(call.stack[i], [&](const at::Tensor& tensor) {
      const at::Tensor meta = on_meta(tensor);
      if (call.traits.written[i - call.first]) outs.emplace_back(meta, tensor);
      return meta;
    }));
  if (call.traits.device >= 0 && (stack[call.traits.device].isDevice() || call.tensors.empty()))
    stack[call.traits.device] = c10::Device(c10::kMeta);
  try {
    const c10::impl::ExcludeDispatchKeyGuard at_once(c10::DispatchKey::DeferredInit);
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::NoGradGuard no_grad;
    call.op.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    // An empty tensor for results gets their size.
    if (!call.traits.only_writes ||
        std::any_of(outs.begin(), outs.end(), [](const auto& out) { return out.second.numel() == 0; }))
      return std::nullopt;
    return std::vector<at::Tensor>(call.traits.returns.size());
  } catch (const std::exception&) {
    return std::nullopt;  // the operator itself says what is wrong
  }
  for (const auto& [meta, tensor] : outs)
    if (meta.sizes() != tensor.sizes()) return std::nullopt;
  std::vector<at::Tensor> shapes;
  for (size_t i = 0; i < stack.size(); ++i) {
    shapes.push_back(call.traits.returns[i] >= 0 ? at::Tensor() : stack[i].toTensor());
    if (shapes.back().defined() && (!shapes.back().is_meta() || shapes.back().layout() != at::kStrided ||
                                    shapes.back().storage_offset() != 0))
      return std::nullopt;
  }
  return shapes;
}

/// All values are there, and the result is small.
bool Recorder::may_run_now(const Call& call, int64_t output_bytes) {
  if (call.traits.random) return false;
  for (const Call::Argument& argument : call.tensors) {
    const int entry = log_.find(argument.tensor);
    if (entry < 0) continue;
    if (log_.pending_write(entry) || (call.writes(argument) && log_.entry(entry).num_pending > 0))
      return false;
  }
  if (output_bytes == 0) return true;
  if (output_bytes > kSmallBytes) return false;
  if (small_bytes_ + output_bytes > kAllSmallBytes) {
    std::erase_if(small_, [](const auto& small) {
      const auto storage = small.second.storage.lock();
      return !storage || storage->_mutable_data_ptr_no_checks().get() == nullptr;
    });
    small_bytes_ = 0;
    for (const auto& small : small_) small_bytes_ += small.second.bytes;
  }
  return small_bytes_ + output_bytes <= kAllSmallBytes;
}

void Recorder::count_small(const torch::jit::Stack& results) {
  for (const c10::IValue& result : results)
    if (result.isTensor() && result.toTensor().defined() && result.toTensor().has_storage()) {
      const at::Tensor& tensor = result.toTensor();
      const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
      const auto [place, is_new] = small_.try_emplace(tensor.storage().unsafeGetStorageImpl(),
                                                      Small{tensor.storage().getWeakStorageImpl(), bytes});
      if (!is_new) continue;
      small_bytes_ += bytes;
      watch(tensor.storage());
    }
}

void Recorder::make_uninitialized(const Call& call) {
  const auto shapes = infer(call);
  if (!shapes || !shapes->front().defined()) return run_as_it_is(call);
  const int64_t bytes = bytes_of(shapes->front());
  const bool small = may_run_now(call, bytes);
  if (small || bytes == 0) {
    run_as_it_is(call);
    return count_small({call.stack.back()});
  }
  const c10::Device device = call.device();
  if (device.is_meta()) return run_as_it_is(call);
  const at::Tensor tensor = without_memory(shapes->front(), device);
  log_.find_or_add(tensor, /*has_memory=*/false);
  torch::jit::drop(call.stack, call.stack.size() - call.first);
  call.stack.emplace_back(tensor);
}

/// May allocate, so the values have to be there.
void Recorder::resize(const Call& call) {
  const int entry = call.tensors.empty() ? -1 : log_.find(call.tensors[0].tensor);
  if (entry < 0) return run_as_it_is(call);
  log_.compute(entry, /*to_write=*/true);
  const Opened opened(log_.entry(entry).storage);
  run_as_it_is(call);
}

int Recorder::stream_of(const Call& call) {
  if (call.traits.generator >= 0 && call.stack[call.first + call.traits.generator].isGenerator())
    return log_.stream_of(call.stack[call.first + call.traits.generator].toGenerator());
  return log_.stream_of(at::globalContext().defaultGenerator(call.device()));
}

/// A tensor as the log keeps it.
at::Tensor Recorder::keep(const at::Tensor& tensor, RecordedOperator& recorded) {
  const int entry = log_.find(tensor);
  if (entry >= 0 && !log_.is_exposed(entry)) return shares_storage(tensor);
  const bool is_outside = entry < 0 || !log_.entry(entry).made_here;
  if (!is_outside || bytes_of(tensor) <= kSmallBytes || !is_of_libtorch(tensor.storage())) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
    // The program may write into it through a pointer.
    const c10::impl::ExcludeDispatchKeyGuard at_once(c10::DispatchKey::DeferredInit);
    const at::NoGradGuard no_grad;
    return tensor.detach().clone();
  }
  log_.find_or_add(tensor, /*has_memory=*/true);
  const at::Tensor kept = shares_storage(tensor);
  recorded.outside.push_back(
      {kept, tensor.is_inference() ? std::nullopt : std::optional(tensor._version()), hash_of(kept)});
  return kept;
}

void Recorder::record(const Call& call, const std::vector<at::Tensor>& shapes) {
  RecordedOperator recorded(call.op);
  std::set<int> reads, whole, changes;
  // What it writes is the log's from now on.
  for (const Call::Argument& argument : call.tensors)
    if (call.writes(argument)) {
      const int entry = log_.find_or_add(argument.tensor, /*has_memory=*/true);
      if (small_.contains(argument.tensor.storage().unsafeGetStorageImpl()))
        log_.entry(entry).made_here = true;
    }
  const torch::jit::Stack arguments = call.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool written = call.traits.written[i], read = !call.traits.not_read[i];
    if (written) recorded.written_arguments.push_back(static_cast<int>(i));
    if (read) visit_tensors(arguments[i], [&](const at::Tensor&) { recorded.reads_to_draw = true; });
    recorded.arguments.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      const at::Tensor kept = keep(tensor, recorded);
      if (const int entry = log_.find(kept); entry >= 0) {
        if (written && !read && covers_storage(tensor)) {
          whole.insert(entry);
        } else {
          reads.insert(entry);
          if (written) changes.insert(entry);
        }
      }
      return kept;
    }));
  }
  for (const int entry : whole)
    if (reads.contains(entry)) changes.insert(entry);
  for (const int entry : changes) whole.erase(entry);

  torch::jit::Stack results;
  for (size_t i = 0; i < call.traits.returns.size(); ++i) {
    const int argument = call.traits.returns[i];
    if (argument >= 0 || !shapes[i].defined()) {
      results.push_back(argument >= 0 ? arguments[argument] : c10::IValue(at::Tensor()));
      recorded.outputs.emplace_back();
      continue;
    }
    const at::Tensor output = without_memory(shapes[i], call.device());
    whole.insert(log_.find_or_add(output, /*has_memory=*/false));
    recorded.outputs.push_back(shares_storage(output));
    results.emplace_back(output);
  }
  recorded.reads.assign(reads.begin(), reads.end());
  recorded.overwrites.assign(whole.begin(), whole.end());
  recorded.changes.assign(changes.begin(), changes.end());
  recorded.default_dtype = at::typeMetaToScalarType(at::get_default_dtype());
  recorded.reads_to_draw = recorded.reads_to_draw && call.traits.random;
  if (call.traits.random) {
    recorded.stream = stream_of(call);
    recorded.generator_argument = call.traits.generator;
  }
  for (const Call::Argument& argument : call.tensors)
    if (call.writes(argument) && !argument.tensor.is_inference())
      argument.tensor.unsafeGetTensorImpl()->bump_version();
  log_.add(std::move(recorded));
  torch::jit::drop(call.stack, arguments.size());
  for (c10::IValue& result : results) call.stack.push_back(std::move(result));
}

}  // namespace tessera::zero::deferred

#include "activations/value.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "zero/unit_memory.h"

namespace tessera::activations {

// A chain of Values may be as long as a recurrent layer's input: it is freed in a loop, not by recursion.
Value::~Value() {
  if (!producer) return;
  thread_local std::vector<std::shared_ptr<Call>>* queue = nullptr;  // of the outermost one on this thread
  if (queue != nullptr) {
    queue->push_back(std::move(producer));
    return;
  }
  std::vector<std::shared_ptr<Call>> dying;
  queue = &dying;
  dying.push_back(std::move(producer));
  while (!dying.empty()) {
    const std::shared_ptr<Call> next = std::move(dying.back());
    dying.pop_back();
  }
  queue = nullptr;
}

at::Tensor alias_of(const at::Tensor& tensor) { return tensor.tensor_data(); }

at::Tensor copy_of(const at::Tensor& tensor) {
  const at::DisableRecordFunctionGuard unheard;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return tensor.clone();
}

void remember_generator(Call& call) {
  const int argument = call.facts->generator_argument;
  const c10::IValue given = argument >= 0 ? call.arguments[argument] : c10::IValue();
  if (call.facts->generator_argument < 0 || !given.isGenerator())
    call.generator = at::globalContext().defaultGenerator(call.device);
  else
    call.generator = given.toGenerator();
  const std::lock_guard lock(call.generator->mutex());
  call.generator = call.generator->clone();
}

void keep(Value& value, const at::Tensor& tensor) {
  value.kept = alias_of(tensor);
  value.version = value.kept._version();
  value.depth = 0;
  value.producer.reset();
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool supported(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_inference() && !tensor.is_quantized() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

bool is_parameter(const at::Tensor& tensor) { return zero::find_unit(*storage_of(tensor)) != nullptr; }

std::vector<at::Tensor> flatten(const std::vector<c10::IValue>& results) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& result : results) {
    if (result.isTensorList()) {
      for (const at::Tensor& tensor : result.toTensorVector()) tensors.push_back(tensor);
    } else {
      tensors.push_back(result.isTensor() ? result.toTensor() : at::Tensor());
    }
  }
  return tensors;
}

namespace {

/// Recomputation runs the kernels that ran: no autograd, no autocast around them.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  at::AutoGradMode grad_mode;
  explicit BelowAutograd(bool grad_mode) : grad_mode(grad_mode) {}
};

/// Where an operator takes no generator: the default one has the recorded state while it runs.
class GeneratorState {
 public:
  explicit GeneratorState(const Call& call) {
    if (!call.generator || call.facts->generator_argument >= 0) return;
    generator_ = at::globalContext().defaultGenerator(call.device);
    const std::lock_guard lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_state(call.generator->get_state());
  }
  ~GeneratorState() {
    if (!generator_.defined()) return;
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(before_);
  }
  GeneratorState(const GeneratorState&) = delete;

 private:
  at::Generator generator_;
  at::Tensor before_;
};

void check_unchanged(const Value& value, const OperatorFacts& reader) {
  if (value.recomputed || value.kept._version() == value.version) return;
  throw Error(
      str("activation_checkpointing: ", reader.name,
          " is run again in backward, but a tensor that it reads was written in place after it had run "
          "(between forward and backward?): write into a copy, or train without "
          "activation_checkpointing"));
}

/// What the call's in-place operator may write into: the memory of a value that nobody else needs, or a copy.
at::Tensor writable(const Call::Input& input) {
  const at::Tensor& kept = input.value->kept;
  // A block on disk lends its memory to all who ask while somebody has it.
  const bool own = input.value->recomputed && !input.value->on_disk && input.value.use_count() == 1 &&
                   kept.use_count() == 1 && kept.storage().use_count() == 1;
  return own ? kept : kept.clone();
}

void put_tensors(const Call& call, torch::jit::Stack& stack) {
  std::vector<std::vector<std::pair<int64_t, at::Tensor>>> lists(stack.size());
  for (const Call::Input& input : call.inputs) {
    check_unchanged(*input.value, *call.facts);
    const bool written = (call.facts->written_arguments >> input.argument & 1) != 0;
    at::Tensor tensor = written ? writable(input) : input.value->kept;
    if (input.position < 0) {
      stack[input.argument] = std::move(tensor);
    } else {
      lists[input.argument].emplace_back(input.position, std::move(tensor));
    }
  }
  for (size_t argument = 0; argument < stack.size(); ++argument) {
    if (lists[argument].empty()) continue;
    const bool optional = stack[argument].isInt() && stack[argument].toInt() < 0;  // see describe_list()
    const int64_t size = std::abs(stack[argument].toInt());
    c10::List<at::Tensor> plain;
    c10::List<std::optional<at::Tensor>> with_gaps;
    for (int64_t i = 0, next = 0; i < size; ++i) {
      const auto& given = lists[argument];
      const bool here = next < static_cast<int64_t>(given.size()) && given[next].first == i;
      if (optional)
        with_gaps.push_back(here ? std::optional(given[next].second) : std::nullopt);
      else
        plain.push_back(here ? given[next].second : at::Tensor());
      if (here) ++next;
    }
    stack[argument] = optional ? c10::IValue(with_gaps) : c10::IValue(plain);
  }
}

void leave_out_statistics(const OperatorFacts& facts, torch::jit::Stack& stack) {
  if (facts.first_statistic < 0 || !stack[facts.training_argument].toBool()) return;
  stack[facts.first_statistic] = stack[facts.first_statistic + 1] = c10::IValue();
}

void run(const Call& call) {
  const BelowAutograd below(call.grad_mode);
  torch::jit::Stack stack(call.arguments);
  put_tensors(call, stack);
  leave_out_statistics(*call.facts, stack);
  if (call.generator && call.facts->generator_argument >= 0)
    stack[call.facts->generator_argument] = call.generator->clone();
  {
    const GeneratorState state(call);
    call.facts->call->callBoxed(stack);
  }
  const std::vector<at::Tensor> results = flatten(stack);
  for (size_t i = 0; i < results.size() && i < call.outputs.size(); ++i) {
    const ValuePtr output = call.outputs[i].lock();
    if (!output || output->kept.defined() || !results[i].defined()) continue;
    output->kept = results[i];
    output->recomputed = true;
    output->producer.reset();
  }
}

}  // namespace

at::Tensor make(const ValuePtr& value, Work& work) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  std::vector<ValuePtr> wanted{value};
  while (!wanted.empty()) {
    const ValuePtr& next = wanted.back();
    if (!next->kept.defined() && next->on_disk) {
      const Clock::time_point start = Clock::now();
      next->kept = next->on_disk->fetch();
      work.read_seconds += seconds_since(start);
      next->recomputed = true;
    }
    if (next->kept.defined()) {
      wanted.pop_back();
      continue;
    }
    if (!next->producer)
      throw Error("activation_checkpointing: a dropped tensor has lost what it is made of (a bug)");
    const std::shared_ptr<Call> call = next->producer;
    const size_t before = wanted.size();
    for (const Call::Input& input : call->inputs)
      if (!input.value->kept.defined()) wanted.push_back(input.value);
    if (wanted.size() != before) continue;
    const Clock::time_point start = Clock::now();
    run(*call);
    work.call_seconds += seconds_since(start);
    ++work.num_calls;
    if (!wanted.back()->kept.defined())
      throw Error(str("activation_checkpointing: ", call->facts->name,
                      " was run again, but did not make the tensor that it had made (a bug)"));
  }
  return value->kept;
}

}  // namespace tessera::activations

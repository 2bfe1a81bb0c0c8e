#include "activations/value.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <xxhash.h>

#include <cctype>
#include <chrono>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "zero/memory/pause_listening.h"
#include "zero/memory/unit_memory.h"

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

namespace {

/// The operators that are called while one lives run below autograd, and below modes, which are the model's.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  zero::BelowModes no_modes;
};

}  // namespace

at::Tensor alias_of(const at::Tensor& tensor) { return tensor.tensor_data(); }

at::Tensor copy_of(const at::Tensor& tensor) {
  const at::DisableRecordFunctionGuard unheard;
  const BelowAutograd below;
  if (tensor.is_conj()) return copy_of(tensor.conj()).conj();
  if (tensor.is_neg()) return copy_of(tensor._neg_view())._neg_view();
  if (tensor.numel() == 0) return tensor.clone();
  int64_t span = 1;  // elements from the first to the last
  for (int64_t d = 0; d < tensor.dim(); ++d) span += (tensor.size(d) - 1) * tensor.stride(d);
  constexpr uintptr_t kAlignment = 64;
  const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment /
                                           static_cast<uintptr_t>(tensor.element_size()));
  const at::Tensor memory = at::empty({before + span}, tensor.options());
  memory.narrow(0, before, span).copy_(tensor.as_strided({span}, {1}, tensor.storage_offset()));
  return memory.as_strided(tensor.sizes(), tensor.strides(), before);
}

Digest digest_of(const at::Tensor& given) {
  const at::DisableRecordFunctionGuard unheard;
  const BelowAutograd below;
  at::Tensor tensor = given;
  for (int64_t d = 0; d < tensor.dim(); ++d)  // of an expanded one each element once
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  tensor = tensor.cpu().contiguous();
  const at::IntArrayRef sizes = given.sizes();
  const auto kind =
      static_cast<uint64_t>(given.scalar_type()) << 2 | (given.is_conj() ? 2 : 0) | (given.is_neg() ? 1 : 0);
  const uint64_t seed = XXH3_64bits_withSeed(sizes.data(), sizes.size() * sizeof(int64_t), kind);
  return {.hash = XXH3_64bits_withSeed(tensor.const_data_ptr(), tensor.nbytes(), seed),
          .dtype = given.scalar_type(),
          .sizes = sizes.vec()};
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

// torch.func.functionalize's tensors have a storage without memory.
bool supported(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_meta() &&
         !tensor._is_zerotensor() && !tensor.is_inference() && !tensor.is_quantized() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         !tensor.key_set().has(c10::DispatchKey::Functionalize);
}

bool is_parameter(const at::Tensor& tensor) { return zero::find_unit(*storage_of(tensor)) != nullptr; }

// Tensor.numpy() leaves the memory as it is, but for this mark.
bool is_shared_memory(const at::Tensor& tensor) { return !storage_of(tensor)->resizable(); }

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

/// "float 64x64"
std::string describe(const Digest& digest) {
  std::string dtype = at::toString(digest.dtype);
  for (char& letter : dtype) letter = static_cast<char>(std::tolower(letter));
  return str(dtype, " ", digest.sizes.empty() ? "scalar" : join(digest.sizes, "x"));
}

/// "float 64x64 in the forward, double 64x64 again"
std::string difference(const Digest& before, const Digest& now) {
  const std::string was = describe(before), is = describe(now);
  return was == is ? str("other values in the ", was) : str(was, " in the forward, ", is, " again");
}

/// Compares the value with its digest, once. Returns what it has become where it differs.
std::optional<Digest> differs(Value& value, Digest& before, Work& work) {
  if (!value.digest) return std::nullopt;
  ++work.num_verified;
  before = *std::exchange(value.digest, std::nullopt);
  Digest now = digest_of(value.kept);
  return now == before ? std::nullopt : std::optional(std::move(now));
}

std::string keep_advice(const OperatorFacts& facts) {
  return str("\"activation_checkpointing\": {\"keep\": [\"", facts.name, "\"]}");
}

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

void check_unchanged(Value& value, const OperatorFacts& reader, Work& work) {
  if (value.recomputed && !value.handed_out) return;  // compared when it was made, and seen by nobody else
  if (value.kept._version() != value.version)
    throw Error("activation_checkpointing: ", reader.name,
                " is run again in backward, but a tensor that it reads was written in place after it had run "
                "(between forward and backward?): write into a copy, or train without "
                "activation_checkpointing");
  Digest before;
  if (const auto now = differs(value, before, work))
    throw Error("activation_checkpointing: ", reader.name,
                " is run again in backward, and a tensor that it reads differs: ", difference(before, *now),
                ". Possible causes: code that calls no operator (numpy, an extension, a graph of "
                "torch.compile) has written it since the forward. What to do: give the model a copy, or "
                "keep the results: ",
                keep_advice(reader));
}

/// See [Note: verification].
void verify(const Call& call, Value& value, Work& work) {
  Digest before;
  if (const auto now = differs(value, before, work))
    throw Error("activation_checkpointing: ", call.facts->name,
                " was run again in backward, and its result differs: ", difference(before, *now),
                ". Possible causes: the operator does not compute the same each time, it reads something "
                "that is not recorded (then this is a fault of tessera), or code that calls no operator "
                "(numpy, an extension) has written the result in the forward. What to do: keep its "
                "results: ",
                keep_advice(*call.facts));
}

/// What the call's in-place operator may write into: the memory of a value that nobody else needs, or a copy.
at::Tensor writable(const Call::Input& input) {
  const at::Tensor& kept = input.value->kept;
  // A block on disk lends its memory to all who ask while somebody has it.
  const bool own = input.value->recomputed && !input.value->on_disk && input.value.use_count() == 1 &&
                   kept.use_count() == 1 && kept.storage().use_count() == 1;
  return own ? kept : copy_of(kept);
}

void put_tensors(const Call& call, torch::jit::Stack& stack, Work& work) {
  if (const auto& blank = call.overwritten)
    stack[call.facts->in_place_argument] = at::empty_strided(blank->sizes, blank->strides, blank->options);
  std::vector<std::vector<std::pair<int64_t, at::Tensor>>> lists(stack.size());
  for (const Call::Input& input : call.inputs) {
    check_unchanged(*input.value, *call.facts, work);
    const bool written = static_cast<int>(input.argument) == call.facts->in_place_argument;
    at::Tensor tensor = written ? writable(input) : input.value->kept;
    if (input.wrapped_number) {  // a mark of the argument: others read the same value without it
      tensor = alias_of(tensor);
      tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    if (input.position < 0) {
      stack[input.argument] = std::move(tensor);
    } else {
      lists[input.argument].emplace_back(input.position, std::move(tensor));
    }
  }
  for (size_t argument = 0; argument < stack.size(); ++argument) {
    if (lists[argument].empty()) continue;
    const bool optional =
        stack[argument].isInt() && stack[argument].toInt() < 0;  // operator_started() negates its size
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

void run(const Call& call, Work& work) {
  const BelowAutograd below;
  const WithSettings settings(*call.settings);
  torch::jit::Stack stack(call.arguments);
  put_tensors(call, stack, work);
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
    verify(call, *output, work);
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
      Digest before;
      if (differs(*next, before, work))
        throw Error(
            "activation_checkpointing: a saved tensor (", describe(before),
            ") that was read back from disk has other values than were written there: the disk, or its "
            "file system, has damaged it (activation_checkpointing.nvme_path)");
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
    run(*call, work);
    work.call_seconds += seconds_since(start);
    ++work.num_calls;
    if (!wanted.back()->kept.defined())
      throw Error("activation_checkpointing: ", call->facts->name,
                  " was run again, but did not make the tensor that it had made (a bug)");
  }
  return value->kept;
}

}  // namespace tessera::activations

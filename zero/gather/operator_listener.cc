#include "zero/gather/operator_listener.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "zero/gather/cast_tracker.h"
#include "zero/gather/compiled_graphs.h"
#include "zero/gather/residency.h"
#include "zero/memory/unit_memory.h"

namespace tessera::zero {
namespace {

/// What this thread is in the middle of. Operators nest within a thread, so this
/// cannot be anything but thread-local.
struct ThreadState {
  int depth = 0;                        // operators begun and not ended
  bool inside_residency = false;        // a Residency is at work: the operators that run are ours
  std::vector<Residency*> residencies;  // touched since depth was 0
  /// Has the arguments that an operator writes, one bit each, by the address of its name, which its schema
  /// owns.
  std::unordered_map<const char*, uint64_t> written_arguments;
};
thread_local ThreadState thread_state;

/// What an aten::_to_copy is about to copy. Made for those alone: all other
/// operators do without memory of their own.
struct Casting : at::ObserverContext {
  explicit Casting(CastSource source) : source(std::move(source)) {}
  CastSource source;
};

// PauseListening is slow: Entering and leaving a PauseListening makes libtorch rebuild its lists of
// callbacks for every scope, 0.7 us in all, while an operator whose units are unsharded costs a seventh of
// that. So around the Residency a flag of our own does the same on this thread. Other threads need none: what
// they get of a unit for a collective is a view of plain memory (comm/gloo/gloo.cc), which find_unit does not
// know.
class ReentryGuard {
 public:
  ReentryGuard() { thread_state.inside_residency = true; }
  ~ReentryGuard() { thread_state.inside_residency = false; }
  ReentryGuard(const ReentryGuard&) = delete;
};

uint64_t written_arguments(const at::RecordFunction& function) {
  const auto [entry, is_new] = thread_state.written_arguments.try_emplace(function.name(), 0);
  if (!is_new) return entry->second;
  if (const auto schema = function.operator_schema()) {
    const auto& arguments = schema->arguments();
    for (size_t i = 0; i < arguments.size() && i < 64; ++i)
      if (const auto* alias = arguments[i].alias_info(); alias && alias->isWrite())
        entry->second |= uint64_t{1} << i;
  }
  return entry->second;
}

bool is_compiled_forward(const at::RecordFunction& function) {
  return function.name()[0] == 'C' && function.name() == CompiledGraphs::kForward;
}

bool is_compiled_graph(const at::RecordFunction& function) {
  return is_compiled_forward(function) ||
         (function.name()[0] == 'C' && function.name() == CompiledGraphs::kAnnounced);
}

/// Tensor::backward() is an operator too, and everything in backward would be nested in it; so it would in
/// the blocks that code marks for profilers (RECORD_FUNCTION), autograd's own around each node of the graph
/// among them: a checkpointed segment would stay unsharded as a whole.
bool is_operator(const at::RecordFunction& function) {
  constexpr std::string_view kAten = "aten::";
  if (std::strncmp(function.name(), kAten.data(), kAten.size()) == 0)
    return std::strcmp(function.name() + kAten.size(), "_backward") != 0;
  return is_compiled_graph(function) || function.operator_name().has_value();
}

/// Whether it counts for the nesting depth: the same at an operator's start and at its end.
bool counts(const at::RecordFunction& function) {
  return !thread_state.inside_residency && is_operator(function);
}

/// Returns those of the process, to which the callbacks belong too. See [Note: compiled graphs].
CompiledGraphs& compiled_graphs() {
  static CompiledGraphs graphs;
  return graphs;
}

void listen_to_compiled_backwards();

/// `residency` is told when the outermost operator has ended.
void tell_of_end(Residency& residency) {
  auto& heard = thread_state.residencies;
  if (std::find(heard.begin(), heard.end(), &residency) == heard.end()) heard.push_back(&residency);
}

void note_use(UnitHandle* handle, const char* operator_name) {
  tell_of_end(*handle->residency);
  handle->residency->on_use(handle->unit, operator_name);
}

/// From this argument on nothing is known of whether it is written. This holds for a graph, which has no
/// schema, and for the arguments that a mask of 64 bits does not hold.
constexpr size_t kUnknownArgument = 64;

/// Returns the handle when `tensor` is (a view of) a parameter, null for casts of one and for anything else.
UnitHandle* visit_argument(const at::RecordFunction& function, const at::Tensor& tensor, size_t argument) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  c10::StorageImpl& storage = *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  UnitHandle* const parameter = find_unit(storage);
  UnitHandle* const handle = parameter != nullptr ? parameter : find_cast(storage);
  if (handle == nullptr || handle->residency == nullptr) return nullptr;
  Residency& residency = *handle->residency;
  const ReentryGuard our_own_operators;
  if (residency.hears_reads()) note_use(handle, function.name());
  if (parameter == nullptr) residency.on_cast_read(handle->unit, storage, function.name());
  if (argument < kUnknownArgument && (written_arguments(function) >> argument & 1) != 0) {
    tell_of_end(residency);
    residency.on_write(handle->unit, tensor, function.name());
  }
  return residency.hears_reads() ? parameter : nullptr;
}

void release_pins() {
  const ReentryGuard our_own_operators;
  for (Residency* residency : thread_state.residencies) residency->operator_ended();
  thread_state.residencies.clear();
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  if (!counts(function)) return nullptr;
  ++thread_state.depth;
  const bool is_graph = is_compiled_graph(function), has_backward = is_compiled_forward(function);
  if (has_backward) listen_to_compiled_backwards();
  std::unique_ptr<Casting> casting;
  size_t argument = is_graph ? kUnknownArgument : 0;
  for (const c10::IValue& value : function.inputs()) {
    if (value.isTensor()) {
      UnitHandle* parameter = visit_argument(function, value.toTensor(), argument);
      // Autocast casts inside an operator (linear > to > _to_copy); a cast that
      // the model makes itself is its own.
      if (has_backward && parameter != nullptr) compiled_graphs().add(function, parameter);
      if (parameter != nullptr && thread_state.depth >= 3 && parameter->residency->tracks_casts() &&
          std::strcmp(function.name(), "aten::_to_copy") == 0)
        casting = std::make_unique<Casting>(cast_source(parameter, value.toTensor()));
    } else if (value.isList()) {  // Tensor[] and Tensor?[]
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) {
          visit_argument(function, item.toTensor(), argument);
        } else if (!item.isNone()) {
          break;
        }
      }
    }
    ++argument;
  }
  return casting;
}

void on_end(const at::RecordFunction& function, at::ObserverContext* context) {
  if (!counts(function)) return;
  if (context != nullptr) {
    const CastSource& cast = static_cast<Casting*>(context)->source;
    if (cast.handle != nullptr && cast.handle->residency != nullptr && !function.outputs().empty() &&
        function.outputs().front().isTensor()) {
      const PauseListening our_own_operators;
      cast.handle->residency->track_cast(cast, function.outputs().front().toTensor());
    }
  }
  if (--thread_state.depth == 0 && !thread_state.residencies.empty()) release_pins();
}

std::unique_ptr<at::ObserverContext> on_backward_start(const at::RecordFunction& function) {
  if (function.name() != CompiledGraphs::kBackward) return nullptr;
  ++thread_state.depth;
  const std::vector<UnitHandle*> units = compiled_graphs().read_by_forward_of(function);
  const ReentryGuard our_own_operators;
  for (UnitHandle* unit : units) note_use(unit, function.name());
  return nullptr;
}

void on_backward_end(const at::RecordFunction& function, at::ObserverContext*) {
  if (function.name() != CompiledGraphs::kBackward) return;
  compiled_graphs().erase(function);
  if (--thread_state.depth == 0 && !thread_state.residencies.empty()) release_pins();
}

/// Is called at the first graph: each node of backward costs a call more from then on.
void listen_to_compiled_backwards() {
  static const at::CallbackHandle once =
      at::addGlobalCallback(at::RecordFunctionCallback(on_backward_start, on_backward_end)
                                .scopes({at::RecordScope::BACKWARD_FUNCTION}));
  static_cast<void>(once);
}

/// The callback of the process, which all listeners share: libtorch keeps its
/// list of callbacks for the process, too.
class Callback {
 public:
  static Callback& of_process() {
    static Callback callback;
    return callback;
  }

  /// `listeners`, `casting`: how many there are more (or fewer) from now on.
  void change(int listeners, int casting) {
    const std::lock_guard lock(mutex_);
    num_listeners_ += listeners;
    num_casting_ += casting;
    const bool outputs = num_casting_ > 0;
    if (num_listeners_ > 0 && handle_ && outputs == with_outputs_) return;
    // The new one first: other threads may be in the middle of a model.
    const std::optional<at::CallbackHandle> before = std::exchange(handle_, std::nullopt);
    if (num_listeners_ > 0)
      handle_ = at::addGlobalCallback(at::RecordFunctionCallback(on_start, on_end)
                                          .needsInputs(true)
                                          .needsOutputs(outputs)
                                          .scopes({at::RecordScope::FUNCTION}));
    with_outputs_ = outputs;
    if (before) at::removeCallback(*before);
  }

 private:
  std::mutex mutex_;  // guards what follows
  int num_listeners_ = 0, num_casting_ = 0;
  bool with_outputs_ = false;
  std::optional<at::CallbackHandle> handle_;
};

}  // namespace

bool residency_at_work() { return thread_state.inside_residency; }

OperatorListener::OperatorListener(bool casts) : casts_(casts) {
  Callback::of_process().change(1, casts_ ? 1 : 0);
}

OperatorListener::~OperatorListener() {
  Callback::of_process().change(-1, casts_ ? -1 : 0);
  compiled_graphs().forget_the_gone();
}

CompiledGraphRead::CompiledGraphRead(const std::vector<at::Tensor>& inputs) {
  if (thread_state.depth > 0) return;
  std::vector<c10::IValue> parameters;
  for (const at::Tensor& input : inputs)
    if (input.defined() && input.has_storage() &&
        find_unit(*input.storage().unsafeGetStorageImpl()) != nullptr)
      parameters.emplace_back(input);
  event_.emplace(at::RecordScope::FUNCTION);
  event_->before(CompiledGraphs::kAnnounced.data(),
                 c10::ArrayRef<const c10::IValue>(parameters.data(), parameters.size()));
}

}  // namespace tessera::zero

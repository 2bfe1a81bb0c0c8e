#include "zero/gather/operator_listener.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "zero/gather/cast_tracker.h"
#include "zero/gather/residency.h"
#include "zero/memory/pause_listening.h"
#include "zero/memory/unit_memory.h"
#include "zero/operators/compiled_graphs.h"
#include "zero/operators/forward_notes.h"
#include "zero/operators/per_operator.h"

namespace tessera::zero {
namespace {

/// What this thread is in the middle of. Operators nest within a thread, so this
/// cannot be anything but thread-local.
struct ThreadState {
  int depth = 0;                        // operators begun and not ended
  std::vector<Residency*> residencies;  // touched since depth was 0
};
thread_local ThreadState thread_state;

/// What an aten::_to_copy is about to copy. Made for those alone: all other
/// operators do without memory of their own.
struct Casting : at::ObserverContext {
  explicit Casting(CastSource source) : source(std::move(source)) {}
  CastSource source;
};

/// The arguments that an operator writes, as its schema says.
struct WrittenArguments {
  explicit WrittenArguments(const c10::OperatorHandle& op) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size() && i < 64; ++i)
      if (const auto* alias = arguments[i].alias_info(); alias && alias->isWrite()) bits |= uint64_t{1} << i;
  }
  uint64_t bits = 0;
};

bool writes(const OperatorCall& call, size_t argument) {
  if (call.is_graph() || argument >= 64) return false;  // nothing is known
  const WrittenArguments* const written = PerOperator<WrittenArguments>::of(call.function());
  return written != nullptr && (written->bits >> argument & 1) != 0;
}

/// `residency` is told when the outermost operator has ended.
void tell_of_end(Residency& residency) {
  auto& heard = thread_state.residencies;
  if (std::find(heard.begin(), heard.end(), &residency) == heard.end()) heard.push_back(&residency);
}

void note_use(UnitHandle* handle, const char* operator_name) {
  tell_of_end(*handle->residency);
  handle->residency->on_use(handle->unit, operator_name);
}

/// Returns the handle when `tensor` is (a view of) a parameter, null for casts of one and for anything else.
UnitHandle* visit_argument(const OperatorCall& call, const at::Tensor& tensor, size_t argument) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  c10::StorageImpl& storage = *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  UnitHandle* const parameter = find_unit(storage);
  UnitHandle* const handle = parameter != nullptr ? parameter : find_cast(storage);
  if (handle == nullptr || handle->residency == nullptr) return nullptr;
  Residency& residency = *handle->residency;
  const OurOwnOperators of_the_residency;
  if (residency.hears_reads()) note_use(handle, call.name());
  if (parameter == nullptr) residency.on_cast_read(handle->unit, storage, call.name());
  if (writes(call, argument)) {
    tell_of_end(residency);
    residency.on_write(handle->unit, tensor, call.name());
  }
  return residency.hears_reads() ? parameter : nullptr;
}

class ReadObserver final : public OperatorObserver {
 public:
  static ReadObserver& of_process() {
    static ReadObserver& observer = *new ReadObserver;
    return observer;
  }

  std::unique_ptr<at::ObserverContext> begin(const OperatorCall& call) override {
    if (call.is_node()) {
      if (is_of_graph(call)) begin_backward(call);
      return nullptr;
    }
    ++thread_state.depth;
    return visit_arguments(call);
  }

  void end(const OperatorCall& call, at::ObserverContext* context) override {
    if (call.is_node() && !is_of_graph(call)) return;
    if (call.is_node()) units_of_graphs_.forget(call.function());
    if (context != nullptr) track(static_cast<Casting&>(*context).source, call.outputs());
    if (--thread_state.depth == 0 && !thread_state.residencies.empty()) release_pins();
  }

  void forget_the_gone() {
    units_of_graphs_.forget_if([](const Units& units) {
      return std::any_of(units.begin(), units.end(),
                         [](const auto& unit) { return unit->residency == nullptr; });
    });
  }

 private:
  using Units = std::vector<std::shared_ptr<UnitHandle>>;
  static constexpr size_t kMostGraphs = 4096;

  static bool is_of_graph(const OperatorCall& node) { return node.name() == kCompiledBackward; }

  std::unique_ptr<Casting> visit_arguments(const OperatorCall& call) {
    std::unique_ptr<Casting> casting;
    size_t argument = 0;
    for (const c10::IValue& value : call.inputs()) {
      if (value.isTensor()) {
        UnitHandle* const parameter = visit_argument(call, value.toTensor(), argument);
        if (parameter != nullptr && call.kind() == OperatorCall::Kind::kGraph) add_to_graph(call, parameter);
        // Autocast casts inside an operator (linear > to > _to_copy); a cast that
        // the model makes itself is its own.
        if (parameter != nullptr && thread_state.depth >= 3 && parameter->residency->tracks_casts() &&
            std::strcmp(call.name(), "aten::_to_copy") == 0)
          casting = std::make_unique<Casting>(cast_source(parameter, value.toTensor()));
      } else if (value.isList()) {  // Tensor[] and Tensor?[]
        for (const c10::IValue& item : value.toListRef()) {
          if (item.isTensor()) {
            visit_argument(call, item.toTensor(), argument);
          } else if (!item.isNone()) {
            break;
          }
        }
      }
      ++argument;
    }
    return casting;
  }

  void add_to_graph(const OperatorCall& graph, UnitHandle* unit) {
    // Each node of backward costs a call more from the first graph on.
    std::call_once(at_the_first_graph_, [&] {
      nodes_ = std::make_unique<Hearing>(Turn::kResidency, *this, Needs{.nodes = true});
    });
    units_of_graphs_.note(graph.function(), [&](Units& units) {
      const bool is_known =
          std::any_of(units.begin(), units.end(), [&](const auto& one) { return one.get() == unit; });
      if (!is_known) units.push_back(unit->shared_from_this());
    });
  }

  void begin_backward(const OperatorCall& node) {
    ++thread_state.depth;
    const OurOwnOperators of_the_residency;
    for (const auto& unit : units_of_graphs_.of(node.function()).value_or(Units()))
      if (unit->residency != nullptr) note_use(unit.get(), node.name());
  }

  static void track(const CastSource& cast, const std::vector<c10::IValue>& outputs) {
    if (cast.handle == nullptr || cast.handle->residency == nullptr || outputs.empty() ||
        !outputs.front().isTensor())
      return;
    const PauseListening our_own_operators;
    cast.handle->residency->track_cast(cast, outputs.front().toTensor());
  }

  static void release_pins() {
    const OurOwnOperators of_the_residency;
    for (Residency* residency : thread_state.residencies) residency->operator_ended();
    thread_state.residencies.clear();
  }

  /// The units that each forward of a graph has read, until its backward has ended. Handles, and no memory of
  /// an engine that is gone.
  ForwardNotes<Units> units_of_graphs_{kMostGraphs};
  std::once_flag at_the_first_graph_;
  std::unique_ptr<Hearing> nodes_;
};

}  // namespace

OperatorListener::OperatorListener(bool casts)
    : hearing_(Turn::kResidency, ReadObserver::of_process(), {.outputs = casts}) {}

OperatorListener::~OperatorListener() { ReadObserver::of_process().forget_the_gone(); }

CompiledGraphRead::CompiledGraphRead(const std::vector<at::Tensor>& inputs) {
  if (thread_state.depth > 0) return;
  std::vector<c10::IValue> parameters;
  for (const at::Tensor& input : inputs)
    if (input.defined() && input.has_storage() &&
        find_unit(*input.storage().unsafeGetStorageImpl()) != nullptr)
      parameters.emplace_back(input);
  event_.emplace(at::RecordScope::FUNCTION);
  event_->before(kCompiledGraphRead.data(),
                 c10::ArrayRef<const c10::IValue>(parameters.data(), parameters.size()));
}

}  // namespace tessera::zero

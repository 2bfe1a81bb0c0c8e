#include "activations/listener.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "zero/gather/compiled_graphs.h"
#include "zero/gather/operator_listener.h"
#include "zero/memory/unit_memory.h"

namespace tessera::activations {
namespace {

struct ThreadState {
  std::shared_ptr<Subject> subject;  // what this thread is in the forward of
  int64_t pass = -1;                 // and in which of its passes
  RunningOperator* innermost = nullptr;
  bool unheard = false;

  bool records() const { return subject && subject->active && subject->pass == pass; }
};
thread_local ThreadState thread_state;

class Subjects {
 public:
  static Subjects& of_process() {
    static Subjects subjects;
    return subjects;
  }
  void add(const std::shared_ptr<Subject>& subject);
  void remove(const Subject& subject);
  std::shared_ptr<Subject> find(const zero::Residency* residency) const {
    const std::shared_lock lock(mutex_);
    const auto found = by_residency_.find(residency);
    return found == by_residency_.end() ? nullptr : found->second;
  }
  /// An operator is about to write these; `own`: the model that records it, or null.
  void announce_write(const std::vector<at::Tensor>& tensors, const Subject* own) const {
    const std::shared_lock lock(mutex_);
    for (const auto& [residency, subject] : by_residency_)
      if (subject.get() != own) subject->recording->written_elsewhere(tensors);
  }

 private:
  mutable std::shared_mutex mutex_;  // guards what follows
  std::unordered_map<const zero::Residency*, std::shared_ptr<Subject>> by_residency_;
  at::CallbackHandle handle_ = 0;
};

int parameter_at(const Subject& subject, int unit, int64_t offset) {
  const std::vector<int>& parameters = subject.parameters[unit];
  const auto after = std::upper_bound(
      parameters.begin(), parameters.end(), offset,
      [&](int64_t place, int parameter) { return place < subject.slices[parameter].offset; });
  return after == parameters.begin() ? -1 : *(after - 1);
}

/// Looks at an argument of an outermost operator: if `tensor` is a parameter, it tells whose forward this is,
/// and which block.
bool visit(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  const zero::UnitHandle* handle =
      zero::find_unit(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (handle == nullptr || handle->residency == nullptr) return false;
  ThreadState& state = thread_state;
  if (!state.subject || state.subject->residency != handle->residency || !state.records()) {
    if (!at::GradMode::is_enabled()) return false;
    const std::shared_ptr<Subject> subject = Subjects::of_process().find(handle->residency);
    if (!subject || !subject->active) return false;
    state.pass = subject->pass;
    state.subject = subject;
  }
  const int parameter = parameter_at(*state.subject, handle->unit, tensor.storage_offset());
  if (parameter < 0) return false;
  state.subject->recording->enter_block(state.subject->blocks[parameter], parameter);
  return true;
}

void visit_parameters(const at::RecordFunction& function) {
  for (const c10::IValue& value : function.inputs()) {
    if (value.isTensor()) {
      if (visit(value.toTensor())) return;
    } else if (value.isTensorList()) {
      for (const c10::IValue& item : value.toListRef())
        if (item.isTensor() && visit(item.toTensor())) return;
    }
  }
}

bool is_compiled_graph(const at::RecordFunction& function) {
  return function.name()[0] == 'C' && (function.name() == zero::CompiledGraphs::kForward ||
                                       function.name() == zero::CompiledGraphs::kAnnounced);
}

/// Kernels call operators, too: what they make is no concern of autograd.
bool below_autograd() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::AutogradFunctionality);
}

std::unique_ptr<at::ObserverContext> record(const at::RecordFunction& function, const OperatorFacts& facts) {
  ThreadState& state = thread_state;
  auto running = std::make_unique<RunningOperator>();
  running->recording = state.subject->recording;
  running->facts = &facts;
  running->recording->operator_started(*running, function.inputs());
  running->outer = std::exchange(state.innermost, running.get());
  return running;
}

/// See [Note: what is known] in operator_facts.h: of what an opaque operator calls only writes count.
std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  ThreadState& state = thread_state;
  if (state.unheard || zero::residency_at_work()) return nullptr;
  const bool inside_opaque = state.innermost != nullptr && state.innermost->facts->opaque;
  if (!inside_opaque && below_autograd()) return nullptr;
  if (is_compiled_graph(function)) {
    if (inside_opaque) return nullptr;
    if (state.innermost == nullptr) visit_parameters(function);
    return state.records() ? record(function, facts_of_compiled_graph()) : nullptr;
  }
  const OperatorFacts& facts = facts_of(function);
  if (!facts.call) return nullptr;
  if (state.innermost == nullptr) visit_parameters(function);
  const bool records = state.records() && !inside_opaque;
  if (facts.written_arguments != 0)
    Subjects::of_process().announce_write(written_tensors(facts, function.inputs()),
                                          records ? state.subject.get() : nullptr);
  return records ? record(function, facts) : nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr) return;
  auto& running = static_cast<RunningOperator&>(*context);
  thread_state.innermost = running.outer;
  running.recording->operator_ended(running, function.outputs());
}

void Subjects::add(const std::shared_ptr<Subject>& subject) {
  const std::unique_lock lock(mutex_);
  by_residency_[subject->residency] = subject;
  if (handle_ == 0)
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(on_start, on_end)
                                        .needsInputs(true)
                                        .needsOutputs(true)
                                        .scopes({at::RecordScope::FUNCTION}));
}

void Subjects::remove(const Subject& subject) {
  const std::unique_lock lock(mutex_);
  by_residency_.erase(subject.residency);
  if (by_residency_.empty() && handle_ != 0) at::removeCallback(std::exchange(handle_, 0));
}

}  // namespace

Listener::Listener(std::shared_ptr<Subject> subject) : subject_(std::move(subject)) {
  Subjects::of_process().add(subject_);
}

Listener::~Listener() {
  subject_->active = false;
  Subjects::of_process().remove(*subject_);
}

Unheard::Unheard() : before_(std::exchange(thread_state.unheard, true)) {}
Unheard::~Unheard() { thread_state.unheard = before_; }

bool unheard_on_this_thread() { return thread_state.unheard; }

bool records_on_this_thread() { return !thread_state.unheard && thread_state.records(); }

std::shared_ptr<SavedTensor> save_on_this_thread(const at::Tensor& tensor) {
  if (!records_on_this_thread()) return nullptr;
  return thread_state.subject->recording->save(tensor, thread_state.innermost);
}

}  // namespace tessera::activations

#include "activations/checkpointing.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "activations/blocks.h"
#include "core/str.h"
#include "zero/memory/unit_memory.h"

namespace tessera::activations {
namespace {

using zero::OperatorCall;

struct ThreadState {
  std::shared_ptr<RecordedModel> model;  // what this thread is in the forward of
  int64_t pass = -1;                     // and in which of its passes
  RunningOperator* innermost = nullptr;

  bool records() const { return model && model->active && model->pass == pass; }
};
thread_local ThreadState thread_state;

/// Kernels call operators, too: what they make is no concern of autograd.
bool below_autograd() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::AutogradFunctionality);
}

class RecordingObserver final : public zero::OperatorObserver {
 public:
  static RecordingObserver& of_process() {
    static RecordingObserver& observer = *new RecordingObserver;
    return observer;
  }

  void add(const std::shared_ptr<RecordedModel>& model) {
    const std::unique_lock lock(mutex_);
    by_residency_[model->residency] = model;
  }
  void remove(const RecordedModel& model) {
    const std::unique_lock lock(mutex_);
    by_residency_.erase(model.residency);
  }

  /// See [Note: what is known] in operator_facts.h: of what an opaque operator calls only writes count.
  std::unique_ptr<at::ObserverContext> begin(const OperatorCall& call) override {
    ThreadState& state = thread_state;
    if (call.is_node() || zero::RepeatedOperators::on_this_thread()) return nullptr;
    const bool inside_opaque = state.innermost != nullptr && state.innermost->facts->opaque;
    if (inside_opaque ? call.is_graph() : below_autograd()) return nullptr;
    const OperatorFacts* const facts = facts_of(call);
    if (facts == nullptr) return nullptr;
    if (state.innermost == nullptr) visit_parameters(call);
    const bool records = state.records() && !inside_opaque;
    if (facts->written_arguments != 0)
      announce_write(written_tensors(*facts, call.inputs()), records ? state.model.get() : nullptr);
    return records ? record(call, *facts) : nullptr;
  }

  void end(const OperatorCall& call, at::ObserverContext* context) override {
    if (context == nullptr) return;
    auto& running = static_cast<RunningOperator&>(*context);
    thread_state.innermost = running.outer;
    running.recording->operator_ended(running, call.outputs());
  }

 private:
  std::shared_ptr<RecordedModel> find(const zero::Residency* residency) const {
    const std::shared_lock lock(mutex_);
    const auto found = by_residency_.find(residency);
    return found == by_residency_.end() ? nullptr : found->second;
  }

  /// An operator is about to write these; `own`: the model that records it, or null.
  void announce_write(const std::vector<at::Tensor>& tensors, const RecordedModel* own) const {
    const std::shared_lock lock(mutex_);
    for (const auto& [residency, model] : by_residency_)
      if (model.get() != own) model->recording->written_elsewhere(tensors);
  }

  /// Looks at an argument of an outermost operator: if `tensor` is a parameter, it tells whose forward this
  /// is, and which block.
  bool visit(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return false;
    const zero::UnitHandle* handle =
        zero::find_unit(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    if (handle == nullptr || handle->residency == nullptr) return false;
    ThreadState& state = thread_state;
    if (!state.model || state.model->residency != handle->residency || !state.records()) {
      if (!at::GradMode::is_enabled()) return false;
      const std::shared_ptr<RecordedModel> model = find(handle->residency);
      if (!model || !model->active) return false;
      state.pass = model->pass;
      state.model = model;
    }
    const int parameter = state.model->layout->parameter_at(handle->unit, tensor.storage_offset());
    if (parameter < 0) return false;
    state.model->recording->enter_block(state.model->blocks[parameter], parameter);
    return true;
  }

  void visit_parameters(const OperatorCall& call) const {
    for (const c10::IValue& value : call.inputs()) {
      if (value.isTensor()) {
        if (visit(value.toTensor())) return;
      } else if (value.isTensorList()) {
        for (const c10::IValue& item : value.toListRef())
          if (item.isTensor() && visit(item.toTensor())) return;
      }
    }
  }

  static std::unique_ptr<at::ObserverContext> record(const OperatorCall& call, const OperatorFacts& facts) {
    ThreadState& state = thread_state;
    auto running = std::make_unique<RunningOperator>();
    running->recording = state.model->recording;
    running->facts = &facts;
    running->recording->operator_started(*running, call.inputs());
    running->outer = std::exchange(state.innermost, running.get());
    return running;
  }

  mutable std::shared_mutex mutex_;  // guards what follows
  std::unordered_map<const zero::Residency*, std::shared_ptr<RecordedModel>> by_residency_;
};

std::shared_ptr<RecordedModel> recorded_model(zero::ShardedModel& model, const PolicyOptions& options) {
  const zero::Layout& layout = model.layout();
  auto recorded = std::make_shared<RecordedModel>();
  recorded->recording = std::make_shared<Recording>(options);
  recorded->residency = &model.residency();
  recorded->layout = &layout;
  std::vector<NamedShape> shapes;
  for (const zero::ParameterSpec& spec : layout.parameters())
    shapes.push_back({spec.name, str(static_cast<int>(spec.dtype), " ", join(spec.shape, "x"))});
  if (options.kind == PolicyOptions::Kind::kCheap)
    recorded->blocks.assign(shapes.size(), -1);
  else
    recorded->blocks = blocks_of(shapes, options.is_block);
  return recorded;
}

}  // namespace

Checkpointing::Checkpointing(zero::ShardedModel& model, const PolicyOptions& options, bool install_hooks)
    : recorded_(recorded_model(model, options)),
      hearing_(zero::Turn::kRecording, RecordingObserver::of_process(), {.outputs = true}) {
  RecordingObserver::of_process().add(recorded_);
  if (install_hooks) install_autograd_hooks();
  for (const int block : recorded_->blocks) num_blocks_ = std::max(num_blocks_, block + 1);
}

Checkpointing::~Checkpointing() {
  recorded_->active = false;
  RecordingObserver::of_process().remove(*recorded_);
}

void Checkpointing::end_forward() {
  ++recorded_->pass;
  recorded_->recording->end_pass();
}

bool records_on_this_thread() { return !zero::RepeatedOperators::on_this_thread() && thread_state.records(); }

std::shared_ptr<SavedTensor> save_on_this_thread(const at::Tensor& tensor) {
  if (!records_on_this_thread()) return nullptr;
  return thread_state.model->recording->save(tensor, thread_state.innermost);
}

}  // namespace tessera::activations

// ShardedModel: a model whose parameters have moved into units, with everything that keeps them there, and
// the step protocol: forward, backward and update in the one order that all ranks keep. Construction leaves
// the model's own tensors as views of the units; the model itself is not touched otherwise.
//
//   begin_forward(); ...the model's forward...; end_forward();
//   backward(loss, {.first = true, .last = true});
//   GradientSummary summary = summarize_gradients();
//   if (summary.num_nonfinite > 0) skip_step(); else step(1 / loss_scale);
//
// [Note: dtypes]
// A unit has one dtype, so a model may have parameters of several: they lie in units of their own. Trainable
// parameters of 16 bits have fp32 masters, wherever their dtype comes from; fp32 ones are their own masters;
// frozen ones have none. So a frozen bf16 base stays 2 bytes an element beside fp32 adapters, at every stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/memory/host_thread.h"
#include "core/log.h"
#include "zero/gather/operator_listener.h"
#include "zero/gather/residency.h"
#include "zero/model/model_view.h"
#include "zero/model/module_state.h"
#include "zero/optimizer/sharded_optimizer.h"
#include "zero/plan/collective_order.h"
#include "zero/plan/layout.h"
#include "zero/plan/memory_model.h"
#include "zero/plan/stage.h"
#include "zero/reduce/gradient_reducer.h"
#include "zero/reduce/gradient_summary.h"
#include "zero/reduce/taken_gradients.h"
#include "zero/unit/param_unit.h"
#include "zero/unit/parameter_versions.h"

namespace tessera::zero {

struct ShardedModelOptions {
  Sharding sharding;
  /// Replicas, and second copies: where parameters are sharded. See [Note: hybrid sharding] in mesh.h.
  GroupSizes groups;
  Tiers tiers;
  OffloadOptions offload;  ///< where tiers say disk
  /// Is set where tiers say device_memory_is_separate. Tests give one whose device is the host.
  std::shared_ptr<comm::HostTransfer> transfer = nullptr;
  /// bf16, fp16: that of all parameters. fp32: each keeps its own, see [Note: dtypes].
  DType compute_dtype = DType::kFloat32;
  std::optional<DType> buffer_dtype;  ///< of floating buffers; unset: each keeps its own
  at::Device device = at::kCPU;
  int64_t unit_numel = 4'000'000;
  ReducerOptions reducer;
  ResidencyOptions residency;
  ShardedOptimizer::Options optimizer{.groups = {kernels::Hyper{}}};
  /// Index into optimizer.groups, or kUntrained: the parameter keeps its value, also where it requires a
  /// gradient. Unset: 0.
  std::function<int(const std::string& name)> group_of;
  static constexpr int kUntrained = -1;
  /// Returns, for a model made without memory, whether the values of the parameter of this name are loaded
  /// next, so that nobody computes them. They are zeros until then. Unset: none.
  std::function<bool(const std::string& name)> loaded_next;
};

/// The place of a backward pass in the accumulation of gradients.
struct MicroStep {
  bool first = true;  ///< the gradients start anew
  bool last = true;   ///< an update follows
  double factor = 1;  ///< each gradient is multiplied by it
};

/// Shards a model over ranks and carries out its steps. Used by one thread at a time. Calls marked Collective
/// must be made by all ranks, in the same order.
class ShardedModel {
 public:
  /// Collective. Values and buffers of rank 0 become every rank's. In training mode. Throws ConfigError for
  /// parameters that cannot be sharded, CommError when the ranks' models differ.
  ShardedModel(const ModelView& model, comm::CommunicatorPtr comm, const ShardedModelOptions& options);
  ~ShardedModel();
  ShardedModel(const ShardedModel&) = delete;

  // -- the step protocol --
  /// Collective. eval() makes rank 0's buffers every rank's (as DistributedDataParallel's broadcast_buffers,
  /// but when asked).
  void train();
  void eval();
  bool training() const { return training_; }
  /// Must be called around the model's forward. Collective in evaluation, where all ranks call them equally
  /// often. end_forward() throws what went wrong inside operators.
  void begin_forward();
  void end_forward();
  /// Collective where gradients are reduced: always, but at micro-steps that only add up (stages 0 and 1).
  /// Runs autograd from `loss`, a scalar. Throws CommError, and what went wrong inside operators or hooks;
  /// gradients are incomplete then.
  void backward(const at::Tensor& loss, MicroStep micro_step);
  /// The same of a backward that the caller runs: begin_backward() before the first gradient comes, and
  /// end_backward() after the last. Where the second is not reached, check_usable() says so.
  void begin_backward(MicroStep micro_step);
  void end_backward();
  /// Between these two.
  bool in_backward() const { return order_->reductions.in_backward(); }
  /// Before the first gradient comes: hooks of the user's may have taken the place of all of ours.
  void expect_gradients() { gradients_->install_hooks(); }
  /// Collective. Reduces what earlier micro-steps, none of them the last, have added up: the last micro-step
  /// without a backward.
  void reduce_accumulated();
  /// Collective. After the last micro-step: reduces what came late, and tells of the gradients.
  GradientSummary summarize_gradients(const RankFlags& mine = {});
  /// Collective. After summarize_gradients(): one optimizer step with the gradients times `grad_scale`;
  /// starts the gathers of the new values. Or leaves the parameters as they are.
  void step(double grad_scale);
  void skip_step();
  /// Collective, between steps; for an optimizer of whole parameters ([Note: whole parameters]). Calls
  /// `function` while what this rank owns is whole, and takes over what it writes there. Throws as step().
  void apply_to_whole(const std::function<void()>& function);
  /// By parameter, whether an optimizer of whole parameters has its states on this rank. Empty: another one.
  std::vector<bool> owned_parameters() const;

  /// Throws what went wrong inside an operator, or in a backward() or update that ended half-way:
  /// gradients or parameters stay incomplete then. Then ParameterVersions::check(replaces_parameters). See
  /// [Note: who writes parameters].
  void check_usable(bool replaces_parameters = false);
  /// The same, before a call that drops gradients and replaces what a checkpoint has: all `parameters`, all
  /// `states` of the optimizer. Only incomplete parameters are a failure then, and none where both are true.
  void check_replaceable(bool parameters, bool states);
  /// Whether check_usable() throws something that drop_gradients() may put right.
  bool has_failed() const;
  /// Collective. Drops the gradients of this step and starts it anew, after a forward or backward() that
  /// failed on all ranks, or in the middle of an accumulation. Throws what has failed where parameters are
  /// incomplete, which only a checkpoint puts right; CommError.
  void drop_gradients();
  /// Between backward passes every gradient has been taken: throws Error naming a parameter that has another
  /// one, or whose grad() was written since backward(). Then nothing stands in the place of those that were
  /// taken any more.
  void check_gradients();
  /// Puts tensors that cannot be read into grad() again, which check_gradients() has emptied.
  void stand_in_for_gradients() { taken_->stand_in(gradients_->used()); }
  /// Empties grad() of all parameters. What has been taken stays.
  void free_gradients();

  // -- the whole model --
  /// Collective. Buffers become rank 0's, in value, shape and dtype. Throws CommError naming a buffer that
  /// not all ranks have.
  void broadcast_buffers();
  /// Collective. fp32 copies of a whole parameter (its master weights) and of its accumulated gradient, of
  /// the micro-steps so far; shape as in the model. Throws Error for an unknown name or, for gradients, a
  /// frozen parameter.
  at::Tensor full_parameter(const std::string& name);
  /// Collective. Calls `use` with the elements of a unit, whole: masters in fp32, frozen ones in their own
  /// dtype; (numel) on the device, valid inside of `use`. `room`: uint8 there, of room_for_units() bytes or
  /// more, in which they are gathered: nothing of that size is allocated before `use`, so that memory that
  /// runs out on one rank does not leave the others in the collective. State that this rank cannot read from
  /// its disk is an error on it alone.
  void with_full_unit(int unit, const at::Tensor& room, const std::function<void(const at::Tensor&)>& use);
  /// The bytes of the memory that with_full_unit() takes for the largest of these units.
  int64_t room_for_units(const std::vector<int>& units) const;
  at::Tensor full_gradient(const std::string& name);
  /// Collective. Set them, the gradient at the boundary. `value`: the parameter's shape, on the device, the
  /// same on all ranks. The values that the model computes with are the masters in their dtype.
  void set_full_parameter(const std::string& name, const at::Tensor& value);
  void set_full_gradient(const std::string& name, const at::Tensor& value);
  /// Collective. The optimizer's states of all parameters of a unit, whole: by parameter, in the unit's
  /// order, an fp32 copy of each state, in the order of state_names(). Frozen: none.
  std::vector<std::vector<at::Tensor>> full_states(int unit);
  /// Collective as finish_updates(). Continues a parameter's optimizer with whole states of its shape, on the
  /// CPU, in the order of state_names(), and a number of updates: this rank takes its part. No states: zeros.
  /// Throws Error for an unknown name or a frozen parameter.
  void set_states(const std::string& name, const std::vector<at::Tensor>& states, int64_t num_updates);
  /// Collective. For GatheredParameters: makes whole units readable (and, with `modifier_rank`, writable).
  void pin(const std::vector<int>& units, bool writable);
  /// Collective. Takes over what `modifier_rank` wrote (-1: nothing) and lets the units go.
  void unpin(const std::vector<int>& units, int modifier_rank);
  /// Lets the units go after an error. What was written stays refused until all parameters are replaced.
  void abandon(const std::vector<int>& units, bool writable);

  // -- what this rank keeps: see ParamUnit --
  const ParamUnit& unit(int unit) const { return units_[unit]; }
  ParamUnit& unit(int unit) { return units_[unit]; }
  /// The buffers that the module has now, by each of their names.
  std::vector<NamedTensor> buffers() const;
  /// Returns all of those that a state dict has, also the names without a tensor.
  std::vector<NamedBuffer> persistent_buffers() const;
  /// What initialize() found under a name; unset: no buffer.
  std::optional<BufferKind> first_kind(const std::string& buffer) const;
  const std::map<std::string, BufferKind>& first_kinds() const { return first_kinds_; }
  /// Null: the model has no state besides parameters.
  ModuleState* module_state() const { return state_.get(); }
  /// Collective. Around writes into what ParamUnit::local_state() gives, on all ranks: drops the gradients,
  /// ends the pass under way and waits for gathers; then makes parameters follow the new weights. Not while a
  /// GatheredParameters is open. In between, and when end_replacing() is not reached, the model is unusable:
  /// check_usable() names `call`.
  void begin_replacing(std::string_view call);
  void end_replacing();
  /// Collective where parameters are gathered. step() may leave updates for the units' first use ([Note:
  /// deferred updates] in sharded_optimizer.h): carries them out. To be called before the state is read
  /// otherwise than by operators; the members of this class do so themselves.
  void finish_updates();
  /// Bytes this rank holds on `tier` between steps, measured from the tensors.
  StateBytes measured_bytes(Tier tier = Tier::kDevice) const;
  /// What the layout's arithmetic says it should hold; `async_checkpoints`: with the copy they are
  /// written from.
  StateBytes formula_bytes(bool async_checkpoints = false, Tier tier = Tier::kDevice) const;
  /// Returns what that arithmetic is computed from.
  StateModel state_model(bool async_checkpoints = false) const;
  /// The state that is on disk, or null.
  OffloadStore* offload_store() const { return offload_store_.get(); }
  /// Returns the bytes of the host's memory that offloaded state lies in or passes through: see HostTransfer.
  int64_t pinned_bytes() const { return options_.transfer ? options_.transfer->pinned_bytes() : 0; }
  /// Returns what copies state below the device; null where there is none.
  const std::shared_ptr<comm::HostTransfer>& transfer() const { return options_.transfer; }

  const Layout& layout() const { return *layout_; }
  const Mesh& mesh() const { return mesh_; }
  at::Device device() const { return options_.device; }
  comm::Communicator& comm() { return *comm_; }
  const CollectiveOrder& order() const { return *order_; }
  Residency& residency() { return *residency_; }
  GradientReducer& gradients() { return *gradients_; }
  const GradientReducer& gradients() const { return *gradients_; }
  /// For what it keeps by param group and by parameter; steps are this class's.
  ShardedOptimizer& optimizer() { return *optimizer_; }
  const ShardedOptimizer& optimizer() const { return *optimizer_; }

 private:
  void check_same_model_everywhere() const;
  void make_groups();
  comm::CommunicatorPtr shard_group(const char* name);
  void broadcast_from_rank_0(const at::Tensor& flat, const std::string& label);
  void begin_values(const ModelView& model);
  void move_into_units(DeferredModel* deferred);
  void adopt_buffers();
  void connect_gathers_and_reductions();
  void begin_pass(Pass pass);
  bool backward_was_left() const;
  void leave_step(bool parameters_too);
  void begin_step();
  void update(double grad_scale);
  template <class Function>
  void update_parameters(const Function& function);
  template <class Function>
  void give_new_values(const Function& function);
  void follow_update();
  template <class Function>
  auto or_unusable(const Function& function);
  void connect_to_host();
  void make_offload_store();
  bool host_shared() const;
  int find(const std::string& name) const;
  void drop_gradients_of_untrained();
  void allow_writes(const std::vector<int>& units);

  ShardedModelOptions options_;
  comm::CommunicatorPtr comm_;
  Mesh mesh_;
  // Joins this shard group; its gathers need no common order with the reductions.
  comm::CommunicatorPtr gather_comm_;
  comm::CommunicatorPtr replicas_;  // of this replicate group; null: there is one replica
  std::vector<at::Tensor> parameters_;
  std::shared_ptr<ModuleState> state_;  // null: there is none
  std::map<std::string, BufferKind> first_kinds_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<OffloadStore> offload_store_;
  std::vector<ParamUnit> units_;
  std::unique_ptr<CollectiveOrder> order_;
  std::unique_ptr<Residency> residency_;
  std::unique_ptr<GradientReducer> gradients_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  std::optional<ParameterVersions> versions_;
  bool gathered_ = false;  // some unit is
  std::unique_ptr<TakenGradients> taken_;
  std::vector<at::Tensor> untrained_;  // parameters that require a gradient and keep their values
  std::optional<OperatorListener> listener_;
  bool training_ = true;
  std::exception_ptr failure_;          // of a backward or an update that ended half-way
  bool parameters_incomplete_ = false;  // of an update
  std::vector<bool> used_;              // by parameter: had a gradient on some rank, as the last summary says
  bool host_apart_ = false;             // what the options say, also where nothing lies below the device
  std::unique_ptr<comm::HostThread> host_thread_;  // its tasks use all of the above
};

}  // namespace tessera::zero

// ShardedModel: a model whose parameters have moved into units, with everything that
// keeps them there. Construction leaves the model's own tensors as views of the units;
// the model itself is not touched otherwise.
//
// [Note: one copy on a host]
// Where all ranks share memory (Communicator::allocate_shared), units whose values are sharded (stages 1 to
// 3; frozen ones at stage 3) are one memory for all ranks: each rank updates its shard of it, and reads all
// of it in place. Nothing is ever gathered or released; what is left of a gather is to wait until everybody
// has updated. Nobody updates before everybody's backward has ended, because the gradients' norm, which comes
// first, takes all ranks. So stages 1 and 2 hold no more parameters a rank than stage 3 does, and
// measured_bytes() counts this rank's shard. The model still reads that memory when its engine is gone; then
// nothing keeps a rank from writing into what is everybody's.
//
// [Note: dtypes]
// A unit has one dtype, so a model may have parameters of several: they lie in units of their own. Trainable
// parameters of 16 bits have fp32 masters, wherever their dtype comes from; fp32 ones are their own masters;
// frozen ones have none. So a frozen bf16 base stays 2 bytes an element beside fp32 adapters, at every stage.
//
// [Note: who writes parameters]
// Masters, shards and what other ranks hold follow a write only inside a GatheredParameters with a
// modifier_rank, or when a checkpoint or weights are loaded. Any other write would be undone by the next
// update (16 bits), be this rank's alone (stage 0), or be gathered away (stages 1 to 3). So it is refused at
// every stage and in every dtype: by the operator that writes, where operators are heard (stages 1 to 3), and
// by the parameters' version counters at the next call. Neither sees a write through a raw pointer; at stage
// 0 the counters do not see one through tensor.data() either.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/log.h"
#include "zero/gradient_reducer.h"
#include "zero/layout.h"
#include "zero/memory_model.h"
#include "zero/model_view.h"
#include "zero/operator_listener.h"
#include "zero/residency.h"
#include "zero/sharded_optimizer.h"
#include "zero/stage.h"

namespace tessera::zero {

struct ShardedModelOptions {
  Sharding sharding;
  /// bf16, fp16: that of all parameters and floating buffers. fp32: each keeps its own, see [Note: dtypes].
  DType compute_dtype = DType::kFloat32;
  at::Device device = at::kCPU;
  int64_t unit_numel = 4'000'000;
  bool track_casts = false;    ///< the model runs under autocast
  ReducerOptions reducer;      ///< `sharding` is filled in
  ResidencyOptions residency;  ///< `sharded` and `shared` are filled in
  kernels::OptimizerKind optimizer = kernels::OptimizerKind::kAdamW;
  std::vector<kernels::Hyper> groups{kernels::Hyper{}};
  std::function<int(const std::string& name)> group_of;  ///< index into `groups`; unset: 0
};

class ShardedModel {
 public:
  /// Collective. Values and buffers of rank 0 become every rank's. Throws ConfigError for parameters that
  /// cannot be sharded, CommError when the ranks' models differ.
  ShardedModel(const ModelView& model, comm::CommunicatorPtr comm, const ShardedModelOptions& options);
  ~ShardedModel();
  ShardedModel(const ShardedModel&) = delete;

  const Layout& layout() const { return *layout_; }
  const Sharding& sharding() const { return options_.sharding; }
  at::Device device() const { return options_.device; }
  comm::Communicator& comm() { return *comm_; }
  Residency& residency() { return *residency_; }
  GradientReducer& gradients() { return *gradients_; }
  ShardedOptimizer& optimizer() { return *optimizer_; }

  /// Collective. fp32 copies of a whole parameter (its master weights) and of its accumulated gradient; shape
  /// as in the model. Throws Error for an unknown name or, for gradients, a frozen parameter.
  at::Tensor full_parameter(const std::string& name);
  at::Tensor full_gradient(const std::string& name);

  /// Local. That the model's parameters are still views of the units, with the values the engine left there.
  /// A few loads a parameter. Throws Error naming the first one whose memory was replaced (model->to(),
  /// set_data()), or that was written against [Note: who writes parameters].
  void check_parameters() const;

  /// Collective. Buffers become rank 0's (as DistributedDataParallel's broadcast_buffers, but when asked).
  void broadcast_buffers();

  /// Collective. One optimizer step with the accumulated gradients times `grad_scale`; starts the gathers
  /// of the new values.
  void update(double grad_scale, const std::vector<bool>& used);

  /// Collective where parameters are gathered (stages 1 to 3), otherwise nothing: see Residency.
  void begin_pass(Pass pass) {
    if (listener_) residency_->begin_pass(pass);
  }
  void end_pass() {
    if (listener_) residency_->end_pass();
  }
  void drop_pass() {
    if (listener_) residency_->drop_pass();
  }

  /// Collective. For GatheredParameters: makes whole units readable (and, with `modifier_rank`, writable).
  void pin(const std::vector<int>& units, bool writable) { residency_->pin(units, writable); }
  /// Collective. Takes over what `modifier_rank` wrote (-1: nothing) and lets the units go.
  void unpin(const std::vector<int>& units, int modifier_rank);

  /// Views of what this rank keeps of a unit for good.
  struct Held {
    Range range;         ///< in the unit's elements
    at::Tensor weights;  ///< (range) fp32 masters of a trainable unit, compute dtype of a frozen one
    std::vector<at::Tensor>
        states;  ///< (range) fp32 each, in the order of optimizer().state_names(); frozen: none
  };
  /// Local. All of it: the unit, or this rank's shard, as the stage says.
  Held held(int unit) const;
  /// Local. This rank's shard of it, at every stage alike: what a checkpoint holds of this rank.
  Held shard_of(int unit) const;
  /// Collective. Around writes into what held() gives, on all ranks: ends the pass under way and waits for
  /// gathers; then makes parameters follow the new weights. Not while a GatheredParameters is open.
  void begin_replacing();
  void end_replacing();
  const std::vector<NamedTensor>& buffers() const { return buffers_; }

  /// Local. Bytes this rank holds, measured from the tensors.
  StateBytes measured_bytes() const;
  /// Local. What the layout's arithmetic says it should hold; `async_checkpoints`:
  /// with the copy they are written from.
  StateBytes formula_bytes(bool async_checkpoints = false) const;

 private:
  void check_same_model_everywhere() const;
  void move_into_units(const std::vector<at::Tensor>& tensors);
  void move_unit(int unit, const std::vector<at::Tensor>& tensors);
  void adopt_buffers(const ModelView& model);
  /// Whether this rank keeps the values of just a shard of the unit up to date.
  bool sharded(int unit) const {
    return layout_->units()[unit].trainable ? options_.sharding.optimizer : options_.sharding.parameters;
  }
  at::Tensor allocate_unit(int unit);
  bool any_shared() const { return std::find(shared_.begin(), shared_.end(), true) != shared_.end(); }
  at::Tensor region(int unit, const at::Tensor& flat) const;
  int find(const std::string& name) const;
  void note_version(size_t parameter);
  at::Tensor gather_parameter(int parameter, const at::Tensor& mine, bool whole, std::string_view what);

  ShardedModelOptions options_;
  comm::CommunicatorPtr comm_;
  comm::CommunicatorPtr gather_comm_;  // its gathers need no common order with the reductions
  std::vector<bool> shared_;           // by unit, see [Note: one copy on a host]
  std::vector<at::Tensor> parameters_;
  std::vector<uint32_t> versions_;  // by parameter: its version counter after the last write that is allowed
  std::vector<NamedTensor> buffers_;
  std::unique_ptr<Layout> layout_;
  std::vector<UnitMemory> units_;
  std::vector<at::Tensor> shards_;   // by unit; slice of full() where parameters are not sharded, or shared
  std::vector<at::Tensor> masters_;  // by unit; what this rank updates, fp32
  std::unique_ptr<Residency> residency_;
  std::unique_ptr<GradientReducer> gradients_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  std::optional<OperatorListener> listener_;
};

}  // namespace tessera::zero

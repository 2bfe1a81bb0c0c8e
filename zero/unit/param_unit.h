// ParamUnit: one unit of the Layout as this rank has it. It owns everything that belongs to the unit: the
// memory its parameters are views of, this rank's shard, fp32 masters, optimizer states, the accumulated
// gradient, and the collectives in flight. Residency decides when a unit is unsharded and resharded,
// GradientReducer when its gradient is reduced, ShardedOptimizer what an update computes. Beside it
// they keep the order of their work, counts and flags by parameter, and memory that units share or borrow:
// the buffer pool, the gradient slots, gradients that are not copied in yet.
//
// [Note: one copy on a host]
// Where the ranks of a host share memory (Communicator::allocate_shared), a unit of which each rank updates
// its shard (stages 1 to 3; frozen ones at stage 3) is one memory for all of them: each updates its shard of
// it, and reads all of it in place. It is never gathered on use or released; what is left of a gather is to
// bring the shards of other hosts, once a step, and to wait until every rank of this one has updated. No rank
// updates before every rank's backward has ended, because the gradients' norm, which comes first, takes all
// ranks. So stages 1 and 2 hold no more parameters a rank than stage 3 does, and bytes() counts this rank's
// part of the host's copy. The model still reads that memory when its engine is gone; then nothing keeps a
// rank from writing into its host's values.
//
// [Note: state on the host]
// Where the device's memory is not the host's (CUDA), a tier below the device is the host's memory, or a file
// with buffers in the host's memory. What lies there visits the device where the device needs it: a shard of
// parameters is copied into its place in the gather's buffer, a gradient shard leaves as its reduction ends
// (and comes back to be added to, where the optimizer's update is some micro-steps away). Masters and
// optimizer states never do: they are updated on the host, and new values travel up (sharded_optimizer.h:
// [Note: deferred updates]). Copies are ordered by events ([Note: host transfers] in host_transfer.h). Where
// the host's memory is the device's (CPU ranks) there is no transfer, and none of this.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/memory/host_transfer.h"
#include "zero/memory/buffer_pool.h"
#include "zero/memory/unit_memory.h"
#include "zero/offload/offloaded_tensor.h"
#include "zero/plan/gradient_slots.h"
#include "zero/plan/layout.h"
#include "zero/plan/memory_model.h"
#include "zero/plan/mesh.h"
#include "zero/plan/placement.h"

namespace tessera::zero {

/// Views of what this rank keeps of a unit between steps.
struct LocalState {
  Range range;         ///< in the unit's elements
  at::Tensor weights;  ///< (range) fp32 masters of a trainable unit; values of a frozen one, in its dtype
  std::vector<at::Tensor> states;  ///< (range) fp32 each, as ShardedOptimizer::state_names(); frozen: none
};

/// Which of a unit's state, as bits.
enum StateKinds : unsigned {
  kValues = 1,     ///< the shard
  kOptimizer = 2,  ///< masters beside the values, optimizer states
  kGradient = 4,   ///< the accumulator
  kUpdated = kValues | kOptimizer,
};
constexpr StateKinds operator|(StateKinds a, StateKinds b) {
  return static_cast<StateKinds>(unsigned{a} | unsigned{b});
}

/// What GradientReducer keeps of a trainable unit.
struct UnitGradient {
  /// Accumulate dtype; (shard numel) where the placement shards gradients, else (numel).
  at::Tensor accumulator;
  GradientSlot slot;        ///< see [Note: a ring of slots]
  int num_missing = 0;      ///< parameters that have not had as many gradients as expected in this backward
  bool taken = false;       ///< in this backward: what comes from then on is late
  bool late = false;        ///< a gradient came late, and is still to be reduced
  comm::WorkPtr reduction;  ///< in flight
  /// Where the accumulator is on the host: the buffer on the device that the sum is made in, with what is
  /// added to, undefined while there is none; and when the accumulator has the sum.
  BufferPool::Buffer on_device = {};
  comm::EventPtr arrival = nullptr;
};

/// How units are made.
struct UnitOptions {
  Sharding sharding;
  Tiers tiers;
  at::Device device = at::kCPU;
  std::optional<Mesh> mesh = {};           ///< unset: all ranks of the communicator are one shard group
  OffloadStore* store = nullptr;           ///< where tiers say disk
  comm::HostTransfer* transfer = nullptr;  ///< where the host's memory is not the device's
};

/// Who uses a unit now: what keeps it unsharded.
struct UnitUse {
  bool by_operator = false;  ///< read or written by the operator that runs
  int pins = 0;              ///< by GatheredParameters
  int writers = 0;           ///< of these, with a modifier_rank
  int64_t last_operator = 0;
  bool pinned() const { return by_operator || pins > 0; }
};

/// Owns what one rank has of a unit. Not thread-safe. Residency's lock guards `memory`, `use` and the gather
/// in flight while the model runs; what belongs to the gradient and the update is used by the thread that
/// calls backward() and step().
class ParamUnit {
 public:
  /// Collective. `comm`: of the ranks that hold its shards. Allocates what stays: shard and master, or the
  /// unit's memory, in memory that the ranks share where `comm` has such. Throws CommError when there is no
  /// room.
  ParamUnit(const Layout& layout, int index, const UnitOptions& options, comm::Communicator& comm);
  ParamUnit(ParamUnit&&) noexcept = default;

  /// Collective. Makes `tensors` (by parameter of the layout) views of the unit, with rank 0's values; fills
  /// shard and master. Afterwards a sharded unit has no buffer. `write_value` writes a parameter's values
  /// into a flat tensor; `broadcast` makes a flat tensor rank 0's.
  void move_in(const std::vector<at::Tensor>& tensors, const Layout& layout, comm::Communicator& comm,
               const std::function<void(int parameter, at::Tensor flat)>& write_value,
               const std::function<void(const at::Tensor& flat)>& broadcast);

  // -- fixed at construction --
  int index;
  UnitSpec spec;
  std::string name;   ///< Layout::describe(): "unit 3 (a.weight … b.bias)"
  Mesh mesh;          ///< which ranks hold its shards
  Range shard_range;  ///< this rank's shard, in the unit's elements
  Range owned_range;  ///< the part of it that no other rank answers for: mesh.h
  Placement placement;
  /// What this rank updates, in the unit's elements: its shard, or all of it.
  Range local_range() const { return placement.updates_shard ? shard_range : Range{0, spec.numel}; }

  // -- values --
  UnitMemory memory;
  /// (shard numel) Has the values of this rank's shard; it is a slice of the memory unless the unit is
  /// sharded.
  at::Tensor shard;
  /// (secondary numel) the unit's dtype: this rank's shard of the second copy, where the placement has one.
  /// Current from the first gather of new values on.
  at::Tensor secondary;
  at::Tensor master;  ///< (local numel) fp32; values() itself where these are fp32; undefined: frozen
  std::vector<at::Tensor> states;  ///< (local numel) fp32 each

  /// (local numel), the unit's dtype: the values this rank updates.
  const at::Tensor& values() const { return placement.updates_shard ? shard : memory.full(); }
  /// The part of `flat`, (numel), that this rank updates.
  at::Tensor local(const at::Tensor& flat) const;
  /// All that this rank updates, or what it owns alone, at every stage alike.
  LocalState local_state() const;
  LocalState owned_state() const;
  /// What gather_owned() takes of it: all where every rank updates all, else what this rank owns.
  LocalState state_to_gather() const { return placement.updates_shard ? owned_state() : local_state(); }
  /// Masters beside the values: of another dtype, or on the host.
  bool has_own_master() const {
    return spec.trainable && (spec.dtype != DType::kFloat32 || placement.copies_masters_to_device());
  }
  /// What this rank holds on `tier` between steps, measured from the tensors.
  StateBytes bytes(Tier tier = Tier::kDevice) const;

  UnitGradient gradient;
  UnitUse use;

  // -- state on disk; see [Note: state on disk]. Does nothing for state that is in memory anyhow --
  /// (numel) zeros on that kind's tier.
  at::Tensor make(StateKinds kind, int64_t numel, at::ScalarType dtype, const std::string& what);
  std::vector<OffloadedTensor*> on_disk(StateKinds kinds) const;
  /// Returns the tensor on disk of which `tensor` is a view; null: it is a view of none.
  OffloadedTensor* find_on_disk(const at::Tensor& tensor) const;
  bool is_on_disk(StateKinds kinds) const { return !on_disk(kinds).empty(); }
  /// Must be called around every use of their tensors: see InMemory. Throws Error.
  void acquire(StateKinds kinds, OffloadedTensor::Access access);
  void release(StateKinds kinds);

  /// Is called where the update is computed on the host: the values on the device are the new ones from
  /// `event` on.
  void values_arrive(comm::EventPtr event) { arrival_ = copied_up_ = std::move(event); }
  /// What is given to the device's current stream from now on sees them.
  void follow_values();
  /// Waits until the accumulator on the host has what was reduced; until no copy to the device reads
  /// what is on the host.
  void wait_for_gradient() const;
  void wait_for_copies_up() const;

  // -- unsharded: has a buffer, which is current once the gather in flight has arrived --
  bool unsharded() const { return unsharded_; }
  bool gathering() const { return gather_ != nullptr; }
  /// The gather is of values that are on their way to the device.
  bool arriving() const { return gathering() && arrival_ != nullptr; }
  /// Collective. Issues the all-gather of the shards into the buffer that `memory` holds, which is guarded
  /// until wait_for_unshard(): over `comm`, or, of the second copy, over `secondary_comm`. Throws CommError.
  void unshard(comm::Communicator& comm, comm::Communicator* secondary_comm);
  /// The second copy is current: the next gather is of it.
  bool secondary_current() const { return secondary_current_; }
  /// The shards have new values, or will have before they are gathered.
  void values_changed() { secondary_current_ = false; }
  /// Waits for the gather in flight and makes the memory readable. False when there was none. Throws
  /// CommError.
  bool wait_for_unshard();
  /// Gives the buffer back. No gather may be in flight.
  void reshard(BufferPool& pool);
  /// Is called after a failure. Makes what memory.refuse() has made unreadable readable again where its
  /// buffer has the unit's values. Returns whether it is, or the unit has no buffer. No gather may be in
  /// flight.
  bool readable_again();

  /// These are for a host-shared unit: from the first one on, writes of this rank go to a copy of its own,
  /// until the last one.
  void begin_private_writes(BufferPool& pool);
  /// Each rank of a host writes its part of what all of them have in their copies to the memory they
  /// share.
  void publish_private_writes(const comm::HostRank& place);
  void end_private_writes(BufferPool& pool);

 private:
  Tier tier_of(StateKinds kind) const;
  at::Tensor new_buffer() const;
  at::Tensor shard_on_device();
  void release_shard();
  void keep_second_copy();

  const int num_sharing_;  ///< ranks that a host-shared unit's memory belongs to
  OffloadStore* store_;
  comm::HostTransfer* transfer_;
  std::vector<std::pair<StateKinds, std::unique_ptr<OffloadedTensor>>> offloaded_;
  bool unsharded_ = true;
  bool has_values_ = true;  // the buffer does, unless the unit is resharded or its gather has not arrived
  bool secondary_current_ = false;
  comm::WorkPtr gather_;
  comm::EventPtr copied_up_;  // what is on the host may be changed from then on
  comm::EventPtr arrival_;    // of this rank's shard on the device: an update's, or for the gather in flight
  at::Tensor common_;         // the host-shared buffer while a private copy is bound
};

/// Collective over `comm`, of all ranks. (numel) on the device of its group: `mine` itself where that is all
/// of the unit, else each rank's owned part, in the order of the unit. `what` names it in errors. `room`: of
/// the dtype of `mine`, into which they are gathered, at least room_for() elements; undefined: memory of
/// their own.
at::Tensor gather_owned(const ParamUnit& unit, const at::Tensor& mine, comm::Communicator& comm,
                        std::string_view what, const at::Tensor& room = {});

/// The elements of the memory that gather_owned() takes besides `mine`; 0 where it gathers nothing.
int64_t room_for(const ParamUnit& unit, const comm::Communicator& comm);

/// What a rank has computed for a parameter that it owns (zero/plan/owners.h).
struct OwnedParameter {
  int parameter;
  at::Tensor values;  ///< of the parameter's shape
};

/// Collective over `comm`, of all ranks. Returns (numel) of `dtype`, of 4 bytes or 2, on the device of its
/// group: in what this rank updates of the unit, each parameter as its owner has it in `owned`, to the bit
/// (ranks add integers up), zeros where nobody has one. Frees the values of the unit's parameters.
at::Tensor join_owned(const ParamUnit& unit, const Layout& layout, std::vector<OwnedParameter>& owned,
                      at::ScalarType dtype, comm::Communicator& comm, std::string_view what);

/// Writes what `held`, of elements `range` of the unit, has of the parameter at `slice`: `value`, of its
/// shape.
void copy_part(const at::Tensor& held, Range range, const UnitSlice& slice, const at::Tensor& value);

/// A copy of the parameter's part of `full`, (unit numel), in its shape: in fp32, or of a type that models do
/// not compute in.
at::Tensor cut_out(const Layout& layout, int parameter, const at::Tensor& full);

/// Where the buffers of all units are; the CPU where there are no units.
at::Device device_of(const std::vector<ParamUnit>& units);

/// Whether some unit is gathered when it is used.
bool any_sharded(const std::vector<ParamUnit>& units);
/// Whether some unit is updated in shards, so that new values arrive by a gather.
bool any_updates_shard(const std::vector<ParamUnit>& units);

/// Keeps state of a unit in memory during its lifetime: of these kinds, or one tensor, whatever kind it is
/// of.
class InMemory {
 public:
  using Access = OffloadedTensor::Access;
  InMemory(ParamUnit& unit, StateKinds kinds, Access access) : unit_(unit), kinds_(kinds) {
    if ((kinds & kGradient) != 0) unit_.wait_for_gradient();
    unit_.acquire(kinds, access);
  }
  InMemory(ParamUnit& unit, const at::Tensor& tensor, Access access)
      : unit_(unit), tensor_(unit.find_on_disk(tensor)) {
    if (tensor_ != nullptr) tensor_->acquire(access);
  }
  ~InMemory() noexcept(false) { tensor_ != nullptr ? tensor_->release() : unit_.release(kinds_); }
  InMemory(const InMemory&) = delete;

 private:
  ParamUnit& unit_;
  StateKinds kinds_ = {};  // none
  OffloadedTensor* tensor_ = nullptr;
};

}  // namespace tessera::zero

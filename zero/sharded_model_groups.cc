// The part of ShardedModel that makes its groups of ranks. See [Note: hybrid sharding] in mesh.h.
#include "core/check.h"
#include "zero/sharded_model.h"

namespace tessera::zero {

void ShardedModel::make_groups() {
  const GroupSizes& sizes = options_.groups;
  for (const int size : {sizes.shard, sizes.secondary})
    TESSERA_CHECK(size == 0 || (options_.sharding.parameters && size > 0 && comm_->size() % size == 0),
                  "groups of ", size, " of ", comm_->size(), " ranks");
  TESSERA_CHECK(sizes.shard == 0 || sizes.secondary == 0);
  TESSERA_CHECK(sizes.shard == 0 || options_.tiers.optimizer == Tier::kDevice);
  TESSERA_CHECK(sizes.secondary == 0 || options_.tiers.parameters == Tier::kDevice);
  mesh_ = mesh_of(sizes, comm_->size(), comm_->rank());
  gather_comm_ = row_group("gather");
  options_.residency.mesh = mesh_;
  if (sizes.secondary > 0)
    options_.residency.secondary = comm_->split(mesh_.secondary_ranks(), "gather of the second copy");
  if (mesh_.num_rows() > 1)
    replicas_ = options_.reducer.replicas = comm_->split(mesh_.column_ranks(), "replicas");
}

/// Collective.
comm::CommunicatorPtr ShardedModel::row_group(const char* name) {
  return mesh_.num_rows() > 1 ? comm_->split(mesh_.row_ranks(), name) : comm_->duplicate(name);
}

/// To the first ranks of the rows, and from there within each: where a row shares memory, one of its ranks
/// writes.
void ShardedModel::broadcast_from_rank_0(const at::Tensor& flat, const std::string& label) {
  if (replicas_ && mesh_.shard() == 0) replicas_->broadcast(flat, 0, label)->wait();
  if (gather_comm_->size() > 1) gather_comm_->broadcast(flat, 0, label)->wait();
}

}  // namespace tessera::zero

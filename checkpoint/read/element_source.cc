#include "checkpoint/read/element_source.h"

#include "checkpoint/checkpoint_error.h"
#include "core/numel.h"
#include "core/utf8.h"

namespace tessera::checkpoint {

int64_t StoredTensor::numel() const { return numel_of(shape); }

std::optional<StoredTensor> ElementSource::find(const TensorId& id) const {
  const bool is_state = id.kind == TensorId::Kind::kState;
  if (!is_state && id.kind != TensorId::Kind::kWeights) return find_whole(id);
  const SavedParameter& parameter = manifest_->layout.parameters[static_cast<size_t>(id.index)];
  return StoredTensor{is_state ? DType::kFloat32 : manifest_->layout.weights_type(parameter.unit),
                      parameter.shape};
}

std::vector<std::byte> ElementSource::read_all(const TensorId& id) const {
  const std::optional<StoredTensor> stored = find(id);
  if (!stored) throw CheckpointError("the checkpoint has no ", quoted_name(id.name));
  std::vector<std::byte> bytes(static_cast<size_t>(stored->bytes()));
  read(id, 0, bytes);
  return bytes;
}

}  // namespace tessera::checkpoint

// CastTracker: under torch_autocast, autograd saves low-precision copies of the parameters rather than
// views of the units. Without care each would keep 2 unsharded bytes a parameter alive from forward to
// backward. So copies that cover a part of a unit are remembered (weakly), released together with the
// unit, and cast anew when it is gathered.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "zero/memory/unit_memory.h"

namespace tessera::zero {

/// A dense part of a unit that an operator is about to copy.
struct CastSource {
  UnitHandle* handle = nullptr;
  int64_t offset = 0;  ///< elements
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> strides;
};

/// The part of a unit that `tensor` covers, when it is dense in memory (whatever its strides).
CastSource cast_source(UnitHandle* handle, const at::Tensor& tensor);
/// The unit that `storage`, itself a tracked cast, was cast from, or null.
UnitHandle* find_cast(c10::StorageImpl& storage);

/// Remembers the living casts of one rank's units, releases and refills them. Not thread-safe.
class CastTracker {
 public:
  /// `copy`: what the operator made of `source`. Ignored unless it is a plain cast to another floating type.
  void add(const CastSource& source, const at::Tensor& copy);
  /// The unit's memory goes: drop the memory of its casts, keep their shapes.
  void release(int unit);
  /// The unit is readable again: fill the casts that are still alive.
  void recast(int unit, const at::Tensor& full);
  /// The unit gets new values. Casts of the old ones that were released cannot come back.
  void forget(int unit);

  /// Null where it has gone, so that the cast cannot be read, and of what is no tracked cast.
  static const at::DataPtr& memory_of(c10::StorageImpl& cast);

  int64_t live_bytes() const;                           ///< memory held by tracked casts now
  size_t num_tracked() const { return casts_.size(); }  ///< some may be gone

 private:
  struct Cast {
    int unit;
    CastSource source;
    at::ScalarType dtype;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    bool released = false;
  };
  void prune();

  std::vector<Cast> casts_;
  size_t prune_at_ = 64;  // number of entries at which those of destroyed casts are dropped
};

}  // namespace tessera::zero

#include "zero/gather/cast_tracker.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "zero/memory/storage_access.h"

namespace tessera::zero {
namespace {

/// What a tracked cast's DataPtr carries: its unit's handle and the memory it is bound to.
struct CastHandle {
  std::shared_ptr<UnitHandle> handle;
  at::DataPtr memory;
};

void delete_cast(void* context) { delete static_cast<CastHandle*>(context); }

at::DataPtr pointer_to(UnitHandle* handle, void* data, at::DataPtr memory, at::Device device) {
  return {data, new CastHandle{handle->shared_from_this(), std::move(memory)}, &delete_cast, device};
}

}  // namespace

CastSource cast_source(UnitHandle* handle, const at::Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) return {};
  return {handle, tensor.storage_offset(), tensor.numel(), tensor.scalar_type(), tensor.strides().vec()};
}

/// Null for a storage that is no tracked cast. Without libtorch's checks, which throw where reading does.
static CastHandle* handle_of(c10::StorageImpl& storage) {
  return storage._mutable_data_ptr_no_checks().cast_context<CastHandle>(&delete_cast);
}

UnitHandle* find_cast(c10::StorageImpl& storage) {
  const CastHandle* const cast = handle_of(storage);
  return cast == nullptr ? nullptr : cast->handle.get();
}

void CastTracker::add(const CastSource& source, const at::Tensor& copy) {
  // A cast must not be larger than its unit, whose guarded address space serves it too.
  const bool plain = copy.numel() > 0 && copy.is_floating_point() && copy.scalar_type() != source.dtype &&
                     copy.numel() == source.numel && copy.strides() == source.strides &&
                     copy.storage_offset() == 0 &&
                     copy.storage().nbytes() == static_cast<size_t>(copy.numel() * copy.element_size()) &&
                     static_cast<int64_t>(copy.storage().nbytes()) <= source.handle->bytes;
  if (!plain) return;
  if (casts_.size() >= prune_at_) prune();
  c10::StorageImpl* storage = copy.storage().unsafeGetStorageImpl();
  at::DataPtr memory = storage->set_data_ptr(at::DataPtr());
  void* data = memory.get();
  storage->set_data_ptr_noswap(pointer_to(source.handle, data, std::move(memory), copy.device()));
  casts_.push_back({source.handle->unit, source, copy.scalar_type(), copy.storage().getWeakStorageImpl()});
}

void CastTracker::prune() {
  std::erase_if(casts_, [](const Cast& cast) { return cast.storage.expired(); });
  prune_at_ = std::max<size_t>(64, 2 * casts_.size());
}

void CastTracker::release(int unit) {
  prune();
  for (Cast& cast : casts_) {
    if (cast.unit != unit || cast.released) continue;
    const auto storage = cast.storage.lock();
    if (!storage) continue;
    storage->set_data_ptr_noswap(
        pointer_to(cast.source.handle, cast.source.handle->guard->data(), at::DataPtr(), storage->device()));
    refuse_access(*storage,
                  "tessera: a copy that autocast made of a parameter was released with the parameter's unit, "
                  "and was read other than by an operator");
    cast.released = true;
  }
}

void CastTracker::recast(int unit, const at::Tensor& full) {
  for (Cast& cast : casts_) {
    if (cast.unit != unit || !cast.released) continue;
    const auto storage = cast.storage.lock();
    if (!storage) continue;
    at::Tensor fresh = at::empty({cast.source.numel}, full.options().dtype(cast.dtype));
    fresh.copy_(full.narrow(0, cast.source.offset, cast.source.numel));
    at::DataPtr memory = fresh.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr());
    void* data = memory.get();
    storage->set_data_ptr_noswap(pointer_to(cast.source.handle, data, std::move(memory), full.device()));
    set_access_refused(*storage, false);
    cast.released = false;
  }
}

void CastTracker::forget(int unit) {
  std::erase_if(casts_, [&](const Cast& cast) { return cast.unit == unit; });
}

const at::DataPtr& CastTracker::memory_of(c10::StorageImpl& cast) {
  static const at::DataPtr none;
  const CastHandle* const handle = handle_of(cast);
  return handle == nullptr ? none : handle->memory;
}

int64_t CastTracker::live_bytes() const {
  int64_t bytes = 0;
  for (const Cast& cast : casts_)
    if (const auto storage = cast.storage.lock(); storage && !cast.released) bytes += storage->nbytes();
  return bytes;
}

}  // namespace tessera::zero

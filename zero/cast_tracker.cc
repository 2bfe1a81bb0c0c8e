#include "zero/cast_tracker.h"

#include <ATen/ops/empty.h>

#include "core/check.h"

namespace tessera::zero {
namespace {

/// What a tracked cast's DataPtr carries: its unit's handle (counted) and the memory it is bound to.
struct CastHandle {
  at::DataPtr unit;  // keeps the UnitHandle alive
  UnitHandle* handle;
  at::DataPtr memory;
};

void delete_cast(void* context) { delete static_cast<CastHandle*>(context); }

at::DataPtr pointer_to(UnitHandle* handle, void* data, at::DataPtr memory, at::Device device) {
  return {data, new CastHandle{share(handle), handle, std::move(memory)}, &delete_cast, device};
}

}  // namespace

CastSource cast_source(UnitHandle* handle, const at::Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) return {};
  return {handle, tensor.storage_offset(), tensor.numel(), tensor.strides().vec()};
}

UnitHandle* find_cast(const c10::StorageImpl& storage) {
  const auto* cast = storage.data_ptr().cast_context<CastHandle>(&delete_cast);
  return cast == nullptr ? nullptr : cast->handle;
}

void CastTracker::add(const CastSource& source, const at::Tensor& copy) {
  const bool plain = copy.is_floating_point() && copy.numel() == source.numel && copy.strides() == source.strides &&
                     copy.storage_offset() == 0 &&
                     copy.storage().nbytes() == static_cast<size_t>(copy.numel() * copy.element_size());
  if (!plain) return;
  c10::StorageImpl* storage = copy.storage().unsafeGetStorageImpl();
  at::DataPtr memory = storage->set_data_ptr(at::DataPtr());
  void* data = memory.get();
  storage->set_data_ptr_noswap(pointer_to(source.handle, data, std::move(memory), copy.device()));
  casts_.push_back({source.handle->unit, source, copy.scalar_type(), copy.storage().getWeakStorageImpl()});
}

void CastTracker::release(int unit) {
  std::erase_if(casts_, [](const Cast& cast) { return cast.storage.expired(); });
  for (Cast& cast : casts_) {
    if (cast.unit != unit || cast.released) continue;
    const auto storage = cast.storage.lock();
    // A cast is smaller than its unit, so the unit's guarded address space serves it too.
    const auto bytes = static_cast<int64_t>(storage->nbytes());
    TESSERA_CHECK(bytes <= cast.source.handle->bytes);
    storage->set_data_ptr_noswap(
        pointer_to(cast.source.handle, cast.source.handle->guard->data(), at::DataPtr(), storage->device()));
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
    cast.released = false;
  }
}

int64_t CastTracker::live_bytes() const {
  int64_t bytes = 0;
  for (const Cast& cast : casts_)
    if (const auto storage = cast.storage.lock(); storage && !cast.released) bytes += storage->nbytes();
  return bytes;
}

}  // namespace tessera::zero

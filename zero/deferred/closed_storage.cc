#include "zero/deferred/closed_storage.h"

#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>

#include <utility>

#include "zero/memory/storage_access.h"
#include "zero/memory/torch_versions.h"

namespace tessera::zero::deferred {
namespace {

c10::StorageImpl& impl(const c10::Storage& storage) { return *storage.unsafeGetStorageImpl(); }

void set_memory(const c10::Storage& storage, c10::DataPtr memory) {
  forget_cow(impl(storage));
  impl(storage).set_data_ptr_noswap(std::move(memory));
}

}  // namespace

c10::Storage storage_without_memory(size_t bytes, c10::Device device) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device),
      c10::GetAllocator(device.type()), /*resizable=*/true));
  close(storage);
  return storage;
}

void give_memory(const c10::Storage& storage) {
  const c10::OptionalDeviceGuard device(storage.device());
  c10::Allocator* allocator = impl(storage).allocator();
  if (allocator == nullptr) allocator = c10::GetAllocator(storage.device_type());
  set_memory(storage, allocator->allocate(storage.nbytes()));
}

void drop_memory(const c10::Storage& storage) {
  close(storage);
  set_memory(storage, c10::DataPtr(nullptr, storage.device()));
}

void take_memory(const c10::Storage& storage, const c10::Storage& from) {
  unwatch(from);
  c10::DataPtr& data = impl(from)._mutable_data_ptr_no_checks();
  c10::DataPtr taken(nullptr, from.device());
  std::swap(taken, data);
  set_memory(storage, std::move(taken));
}

void close(const c10::Storage& storage) {
  refuse_access(
      impl(storage),
      "tessera: the values of this tensor are computed when the model is moved into units, and a raw pointer "
      "to them was asked for while the model was made");
}

void open(const c10::Storage& storage) { set_access_refused(impl(storage), false); }

bool is_closed(const c10::Storage& storage) { return is_access_refused(impl(storage)); }

bool owns_memory(const c10::Storage& storage) {
  return impl(storage)._mutable_data_ptr_no_checks().get_context() != nullptr;
}

bool is_of_libtorch(const c10::Storage& storage) {
  const Opened opened(storage);
  if (c10::impl::cow::has_simple_data_ptr(impl(storage)) || is_watched(storage))
    return impl(storage).allocator() != nullptr;
  const at::MapAllocator* const mapping = at::MapAllocator::fromDataPtr(storage.data_ptr());
  return mapping != nullptr &&
         (mapping->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) == 0;
}

void watch(const c10::Storage& storage) {
  if (storage.nbytes() > 0 && !is_closed(storage) && !is_watched(storage))
    c10::impl::cow::lazy_clone_storage(impl(storage));  // the clone goes at once
}

void unwatch(const c10::Storage& storage) {
  if (!is_watched(storage)) return;
  const Opened opened(storage);  // libtorch asks it for its pointer
  materialize_cow(impl(storage));
}

bool is_watched(const c10::Storage& storage) {
  return c10::impl::cow::is_cow_data_ptr(impl(storage)._mutable_data_ptr_no_checks());
}

Opened::Opened(c10::Storage storage)
    : storage_(std::move(storage)), was_closed_(is_access_refused(impl(storage_))) {
  if (was_closed_) open(storage_);
}

Opened::~Opened() {
  if (was_closed_ && storage_) close(storage_);
}

}  // namespace tessera::zero::deferred

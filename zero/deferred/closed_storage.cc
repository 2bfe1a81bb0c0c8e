#include "zero/deferred/closed_storage.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "zero/storage_access.h"

namespace tessera::zero::deferred {
namespace {

c10::StorageImpl& impl(const c10::Storage& storage) { return *storage.unsafeGetStorageImpl(); }

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
  impl(storage).set_data_ptr_noswap(allocator->allocate(storage.nbytes()));
}

void drop_memory(const c10::Storage& storage) {
  close(storage);
  impl(storage).set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
}

void take_memory(const c10::Storage& storage, const c10::Storage& from) {
  c10::DataPtr& data = impl(from)._mutable_data_ptr_no_checks();
  c10::DataPtr taken(nullptr, from.device());
  std::swap(taken, data);
  impl(storage).set_data_ptr_noswap(std::move(taken));
}

void close(const c10::Storage& storage) {
  refuse_access(
      impl(storage),
      "tessera: the values of this tensor are computed when the model is moved into units, and a raw pointer "
      "to them was asked for while the model was made");
}

void open(const c10::Storage& storage) { set_access_refused(impl(storage), false); }

bool owns_memory(const c10::Storage& storage) {
  return impl(storage)._mutable_data_ptr_no_checks().get_context() != nullptr;
}

Opened::Opened(c10::Storage storage)
    : storage_(std::move(storage)), was_closed_(is_access_refused(impl(storage_))) {
  if (was_closed_) open(storage_);
}

Opened::~Opened() {
  if (was_closed_ && storage_) close(storage_);
}

}  // namespace tessera::zero::deferred

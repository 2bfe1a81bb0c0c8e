#include "zero/unit_memory.h"

#include <ATen/ops/empty.h>

#include "core/check.h"

namespace tessera::zero {
namespace {

void drop_reference(void* context) {
  auto* handle = static_cast<UnitHandle*>(context);
  if (handle->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete handle;
}

at::DataPtr pointer_to(UnitHandle* handle, void* data, at::Device device) {
  handle->references.fetch_add(1, std::memory_order_relaxed);
  return {data, handle, &drop_reference, device};
}

}  // namespace

UnitHandle* find_unit(const c10::StorageImpl& storage) {
  return storage.data_ptr().cast_context<UnitHandle>(&drop_reference);
}

at::DataPtr share(UnitHandle* handle) { return pointer_to(handle, handle, at::kCPU); }

UnitMemory::UnitMemory(const Options& options) : handle_(new UnitHandle) {
  handle_->unit = options.unit;
  const size_t bytes = options.numel * at::elementSize(options.dtype);
  handle_->bytes = static_cast<int64_t>(bytes);
  handle_->guard = std::make_unique<GuardedMemory>(
      bytes, str("tessera: the memory of released ", options.description,
                 " was read or written outside of an operator. Hold a GatheredParameters while using raw pointers."));
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, pointer_to(handle_, handle_->guard->data(), options.device),
      /*allocator=*/nullptr, /*resizable=*/false));
  full_ = at::empty({0}, at::TensorOptions().dtype(options.dtype).device(options.device));
  full_.set_(std::move(storage), 0, {options.numel}, {1});
}

UnitMemory::~UnitMemory() {
  if (handle_ == nullptr) return;
  handle_->residency = nullptr;
  drop_reference(handle_);
}

UnitMemory::UnitMemory(UnitMemory&& other) noexcept : handle_(other.handle_), full_(std::move(other.full_)) {
  other.handle_ = nullptr;
}

void UnitMemory::bind(at::Tensor buffer) {
  TESSERA_CHECK(static_cast<int64_t>(buffer.nbytes()) >= bytes());
  void* data = buffer.data_ptr();
  handle_->buffer = std::move(buffer);
  full_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(pointer_to(handle_, data, full_.device()));
}

at::Tensor UnitMemory::release() {
  full_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      pointer_to(handle_, handle_->guard->data(), full_.device()));
  return std::exchange(handle_->buffer, at::Tensor());
}

}  // namespace tessera::zero

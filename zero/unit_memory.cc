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
      bytes, str("tessera: ", options.description,
                 " is not in memory (released, or still being gathered after step()) and was "
                 "used other than by an operator: hold a zero::GatheredParameters around raw pointers and "
                 "torch::save"));
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

UnitMemory::UnitMemory(UnitMemory&& other) noexcept
    : handle_(other.handle_), full_(std::move(other.full_)), bound_(other.bound_) {
  other.handle_ = nullptr;
}

at::Tensor UnitMemory::contents() const {
  return handle_->buffer.narrow(0, 0, bytes()).view(full_.scalar_type());
}

void UnitMemory::hold(at::Tensor buffer) {
  TESSERA_CHECK(static_cast<int64_t>(buffer.nbytes()) >= bytes());
  guard();
  handle_->buffer = std::move(buffer);
}

void UnitMemory::bind() {
  TESSERA_CHECK(has_buffer());
  full_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      pointer_to(handle_, handle_->buffer.data_ptr(), full_.device()));
  bound_ = true;
}

void UnitMemory::guard() {
  if (!std::exchange(bound_, false)) return;
  full_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      pointer_to(handle_, handle_->guard->data(), full_.device()));
}

at::Tensor UnitMemory::release() {
  guard();
  return std::exchange(handle_->buffer, at::Tensor());
}

}  // namespace tessera::zero

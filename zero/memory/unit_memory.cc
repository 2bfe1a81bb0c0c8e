#include "zero/memory/unit_memory.h"

#include <ATen/ops/empty.h>

#include <typeinfo>
#include <utility>

#include "core/check.h"
#include "zero/memory/storage_access.h"

namespace tessera::zero {
namespace {

/// Points to the unit whose memory it is.
struct UnitStorage final : c10::StorageImpl {
  UnitStorage(size_t bytes, at::DataPtr data, std::shared_ptr<UnitHandle> handle)
      : StorageImpl(use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr, /*resizable=*/false),
        handle(std::move(handle)) {}
  const std::shared_ptr<UnitHandle> handle;
};

}  // namespace

UnitHandle* find_unit(const c10::StorageImpl& storage) {
  // The types are compared by address, since comparing two of libtorch's types by name costs more.
  if (&typeid(storage) != &typeid(UnitStorage)) return nullptr;
  return static_cast<const UnitStorage&>(storage).handle.get();
}

UnitMemory::UnitMemory(const Options& options) : handle_(std::make_shared<UnitHandle>()) {
  handle_->unit = options.unit;
  const size_t bytes = options.numel * at::elementSize(options.dtype);
  handle_->bytes = static_cast<int64_t>(bytes);
  released_ = str(
      "tessera: ", options.description,
      " is not in memory (released, or still being gathered after step()) and was read other than by an "
      "operator: use engine.state_dict() or save_model(), or hold a GatheredParameters around raw pointers, "
      "numpy(), pickle and torch.save");
  handle_->guard = std::make_unique<GuardedMemory>(bytes, released_);
  c10::Storage storage(
      c10::make_intrusive<UnitStorage>(bytes, at::DataPtr(handle_->guard->data(), options.device), handle_));
  full_ = at::empty({0}, at::TensorOptions().dtype(options.dtype).device(options.device));
  full_.set_(std::move(storage), 0, {options.numel}, {1});
  refuse_access(*full_.storage().unsafeGetStorageImpl(), released_);
}

UnitMemory::~UnitMemory() {
  if (handle_) handle_->residency = nullptr;
}

/// What is pointed to belongs to the handle, and so lives as long as the storage.
void UnitMemory::point_to(void* data) {
  c10::StorageImpl& storage = *full_.storage().unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(at::DataPtr(data, full_.device()));
  set_access_refused(storage, data == handle_->guard->data());
}

at::Tensor UnitMemory::contents() const {
  return handle_->buffer.narrow(0, 0, bytes()).view(full_.scalar_type());
}

void UnitMemory::refuse(const std::string& why) {
  guard();
  refuse_access(*full_.storage().unsafeGetStorageImpl(), why);
  refused_ = true;
}

void UnitMemory::hold(at::Tensor buffer) {
  TESSERA_CHECK(static_cast<int64_t>(buffer.nbytes()) >= bytes());
  guard();
  handle_->buffer = std::move(buffer);
}

void UnitMemory::bind() {
  TESSERA_CHECK(has_buffer());
  point_to(handle_->buffer.data_ptr());
  bound_ = true;
}

void UnitMemory::guard() {
  if (std::exchange(refused_, false)) refuse_access(*full_.storage().unsafeGetStorageImpl(), released_);
  if (!std::exchange(bound_, false)) return;
  point_to(handle_->guard->data());
}

at::Tensor UnitMemory::release() {
  guard();
  return std::exchange(handle_->buffer, at::Tensor());
}

}  // namespace tessera::zero

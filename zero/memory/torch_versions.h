// What differs between the versions of torch that Tessera builds with (cmake/Torch.cmake lists them), under
// one name each: the one place that asks for the version.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>
#include <torch/version.h>

namespace tessera::zero {

/// Gives a copy-on-write storage memory of its own. Requires: `storage` is one
/// (c10::impl::cow::is_cow_data_ptr).
inline void materialize_cow(c10::StorageImpl& storage) {
#if TORCH_VERSION_MINOR >= 13
  c10::impl::cow::materialize_cow(&storage);
  storage.clear_materializer();
#else
  c10::impl::cow::materialize_cow_storage(storage);
#endif
}

/// The memory of `storage` is about to be replaced: what was copied on write before is not after it. (From
/// torch 2.13 on a storage, and no longer its data pointer, says who copies.)
inline void forget_cow([[maybe_unused]] c10::StorageImpl& storage) {
#if TORCH_VERSION_MINOR >= 13
  storage.clear_materializer();
#endif
}

}  // namespace tessera::zero

#include "zero/memory/storage_access.h"

#include <utility>

namespace tessera::zero {
namespace {

// libtorch turns the switch on and never off, so the member is reached here by its name: an explicit
// instantiation may name what is private.
template <bool c10::StorageImpl::* kSwitch>
struct SwitchOf {
  friend bool& throws_on_access(c10::StorageImpl& storage) { return storage.*kSwitch; }
};
bool& throws_on_access(c10::StorageImpl& storage);
template struct SwitchOf<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void refuse_access(c10::StorageImpl& storage, std::string why) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(why));
}

void set_access_refused(c10::StorageImpl& storage, bool refused) {
  throws_on_access(storage) = refused;
  // Has the storage look at its switches again.
  c10::DataPtr data = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(std::move(data));
}

bool is_access_refused(const c10::StorageImpl& storage) {
  return throws_on_access(const_cast<c10::StorageImpl&>(storage));
}

}  // namespace tessera::zero

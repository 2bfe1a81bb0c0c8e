// Storages that refuse their data pointer: whoever asks for it, with data_ptr() or through an operator, gets
// a c10::Error. Shapes and views stay as they are. It is libtorch's own switch for tensors without memory.
#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace tessera::zero {

/// From now on access throws c10::Error with the message `why`.
void refuse_access(c10::StorageImpl& storage, std::string why);
/// Access works again, or is refused again with the message given last.
void set_access_refused(c10::StorageImpl& storage, bool refused);
bool is_access_refused(const c10::StorageImpl& storage);

}  // namespace tessera::zero

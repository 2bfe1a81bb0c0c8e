// The mark of a value that JSON does not have.
#pragma once

namespace tessera::checkpoint {

/// The key of an object that is a value which JSON does not have (docs/checkpoint_format.md).
inline constexpr const char* kValueTag = "$tessera";

}  // namespace tessera::checkpoint

// What the host's code and the CUDA plugin's both have to know.
#pragma once

namespace tessera::comm::p2p {

/// As many ranks as a group can have.
inline constexpr int kMaxRanks = 64;

}  // namespace tessera::comm::p2p

// A process that finishes what a rank has begun, from the rank to its launcher, which ends all other
// processes that ranks leave behind.
#pragma once

namespace tessera {

/// NAME=1 in the environment of a process: the launcher waits up to 10 s for its end.
inline constexpr const char* kFinishesVariable = "TESSERA_FINISHES";

}  // namespace tessera

// The backend that ranks as threads use where a test does not choose one: ctest runs the suites
// over ranks once on each (tessera_test's BACKENDS), because users on one host get shared
// memory, and those on several a network.
#pragma once

#include <cstdlib>
#include <string>

namespace tessera::testing {

inline std::string default_backend() {
  const char* chosen = std::getenv("TESSERA_TEST_BACKEND");
  return chosen == nullptr ? "gloo" : chosen;
}

inline bool in_shared_memory() { return default_backend() == "shm"; }

}  // namespace tessera::testing

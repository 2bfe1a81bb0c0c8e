// The backend of ranks that are threads, where a test does not choose one: shared memory, as users get it on
// one host. On several they get hybrid communication or a network alone: ctest runs suites again on the
// backends that tessera_test's BACKENDS and FULL_BACKENDS name.
#pragma once

#include <cstdlib>
#include <string>

namespace tessera::testing {

inline std::string default_backend() {
  const char* chosen = std::getenv("TESSERA_TEST_BACKEND");
  return chosen == nullptr ? "shm" : chosen;
}

/// Whether the parameters of stages 1 to 3 are one copy a host, which is not gathered on use.
inline bool in_shared_memory() { return default_backend() == "shm" || default_backend() == "hybrid"; }

}  // namespace tessera::testing

/// At the start of a test to which default_backend() means nothing, such as one that chooses its backends:
/// the suite's run on another backend would repeat it.
/// For files that include <gtest/gtest.h>; ranks, which are programs of their own, do without.
#define TESSERA_ON_ONE_BACKEND() \
  if (std::getenv("TESSERA_TEST_BACKEND") != nullptr) GTEST_SKIP() << "the run without a backend has it"

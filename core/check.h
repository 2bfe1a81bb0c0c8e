// TESSERA_CHECK: our own assertion. It stays on in every build, because NDEBUG has to be defined
// wherever libtorch's headers are included (its record_function.h has a member that exists only
// without NDEBUG, and the wheel is built with it), so `assert` would never fire.
#pragma once

#include <stdexcept>

#include "core/str.h"

/// An invariant of this project's own code. Failing is a bug, never a user's mistake.
#define TESSERA_CHECK(condition, ...)                                                                        \
  do {                                                                                                       \
    if (!(condition))                                                                                        \
      throw std::logic_error(::tessera::str("internal error at ", __FILE__, ":", __LINE__, ": ", #condition, \
                                            " is false. " __VA_OPT__(, ) __VA_ARGS__));                      \
  } while (false)

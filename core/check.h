// TESSERA_CHECK: an assertion that is on in every build. `assert` never fires: NDEBUG must be defined
// wherever libtorch's headers are included, because record_function.h has a member that exists only without
// NDEBUG, and the wheel is built with NDEBUG.
#pragma once

#include <stdexcept>

#include "core/str.h"

/// Checks an invariant of this project's code. A failure is a bug, not a user's mistake.
#define TESSERA_CHECK(condition, ...)                                                                        \
  do {                                                                                                       \
    if (!(condition))                                                                                        \
      throw std::logic_error(::tessera::str("internal error at ", __FILE__, ":", __LINE__, ": ", #condition, \
                                            " is false. " __VA_OPT__(, ) __VA_ARGS__));                      \
  } while (false)

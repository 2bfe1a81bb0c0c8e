// The environment variables of this process.
#pragma once

#include <optional>
#include <string>

namespace tessera {

/// The value of a variable; nullopt where it is unset or empty. `export NAME=$OTHER`, a container's list and
/// a job's file leave empty ones, which mean that nothing was said.
std::optional<std::string> text_variable(const char* name);

/// The value of a variable that is a decimal integer; nullopt if it is unset or anything else.
std::optional<int> integer_variable(const char* name);

}  // namespace tessera

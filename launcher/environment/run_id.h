// What tells a run from all others, and what only its ranks know.
#pragma once

#include <string>
#include <vector>

namespace tessera::launcher {

/// 16 hexadecimal digits, different at each call.
std::string new_run_id();

/// A value for TESSERA_RUN_SECRET: 32 hexadecimal digits. Empty: `variables` ("NAME=value"), or else this
/// process, have one already. An empty value is none.
std::string new_run_secret(const std::vector<std::string>& variables);

}  // namespace tessera::launcher

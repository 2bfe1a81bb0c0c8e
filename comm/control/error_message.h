// One-line error messages: what an exception says, and how ranks and durations are named in them.
#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// What an exception says, in one line: libtorch's what() adds back-traces and source locations.
/// "unknown error" where it says nothing.
std::string error_message(const std::exception& error);
/// Takes a captured exception.
std::string error_message(const std::exception_ptr& error);

/// The first line, without libtorch's source locations.
std::string first_line(std::string_view text);
/// "rank 1", "ranks 1, 2 and 5"
std::string name_ranks(const std::vector<int>& ranks);
/// "2 s", "0.5 s", "30 min"
std::string name_duration(std::chrono::milliseconds duration);

}  // namespace tessera::comm

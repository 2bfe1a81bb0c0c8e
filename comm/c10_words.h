// One line out of libtorch's exceptions, whose what() holds back-traces and source locations.
#pragma once

#include <exception>
#include <string>

namespace tessera::comm {

/// Local. Never empty: "unknown error" where it says nothing.
std::string words_of(const std::exception& error);
/// Local. Of a captured exception.
std::string words_of(const std::exception_ptr& error);

}  // namespace tessera::comm

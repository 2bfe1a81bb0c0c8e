// What a test asks of code that is expected to fail: its message, and how long it took to say so.
#pragma once

#include <chrono>
#include <exception>
#include <string>

namespace tessera::testing {

/// The line of the ErrorType that `body` throws; "" when it throws nothing. Others pass through.
template <class ErrorType = std::exception, class Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "";
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace tessera::testing

// For code that is expected to fail: its message, and the time until it failed.
#pragma once

#include <chrono>
#include <exception>
#include <string>

namespace tessera::testing {

/// what() of the ErrorType that `body` throws; "" if it throws nothing. Other exceptions pass through.
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

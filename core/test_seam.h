// TestSeam: what a test puts in place of a part, or hears from it, without a member in a struct that users
// see. Included by headers named *_internal.h only, which the part's own .cc and its tests include.
#pragma once

#include <utility>

namespace tessera {

/// While it exists, objects of `Part` that this thread makes take `value`. Scopes nest. What an object has
/// taken it keeps.
template <class Part, class T>
class TestSeam {
 public:
  explicit TestSeam(T value) : before_(std::exchange(current(), std::move(value))) {}
  ~TestSeam() { current() = std::move(before_); }
  TestSeam(const TestSeam&) = delete;
  TestSeam& operator=(const TestSeam&) = delete;

  /// Returns this thread's value; T{} outside of any scope.
  static T& current() {
    static thread_local T value{};
    return value;
  }

 private:
  T before_;
};

}  // namespace tessera

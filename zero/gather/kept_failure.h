// KeptFailure: an exception that was met where none can be thrown, such as in a callback of libtorch. It is
// kept until somebody can be told.
//
// A kept failure is thrown, or the process fails.
// An operator that cannot read a unit throws ([Note: a failure is thrown by the operator that reads] in
// unit_memory.h), and every call of the engine throws what is kept. What is left are failures that no
// operator and no call has thrown: a weight of which only a view was taken, a gather ahead of its use, a
// GatheredParameters whose destructor failed. A program that ends then looks as if all had gone well. So the
// first failure that is kept registers a handler of the process's exit. If the status is 0 there, and nobody
// was told, it writes the failure to stderr and makes the status 1. It does not end the process, which is
// ending already, and does nothing where the status says that something failed. The handler is told the
// status (on_exit), so it serves C++ programs and Python alike, after Python has finalised, and whether the
// engine was destroyed before or not. A destructor could only terminate the process with std::terminate(), in
// the middle of what else the program has to do.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <string>

namespace tessera::zero {

/// Keeps the first failure until somebody is told of it. Owns the first failure. Not thread-safe.
class KeptFailure {
 public:
  explicit operator bool() const { return failure_ != nullptr; }
  /// The first one counts, until clear(). It is not thrown to the caller.
  void keep(const std::exception_ptr& failure);
  /// The same of one that is thrown as well, unless it is caught on its way and given to keep().
  void keep_thrown(const std::exception_ptr& failure);
  /// Throws what is kept, if anything is.
  void rethrow();
  /// An operator has thrown its message.
  void was_thrown() { *thrown_ = true; }
  /// Returns the failure's message in one line; empty: there is none.
  const std::string& message() const { return message_; }
  /// Forgets it. One that nobody was told of is thrown in place of that.
  void clear();

 private:
  void set(const std::exception_ptr& failure, bool thrown);

  std::exception_ptr failure_;
  std::string message_;
  std::shared_ptr<std::atomic<bool>> thrown_ = std::make_shared<std::atomic<bool>>(true);
};

}  // namespace tessera::zero

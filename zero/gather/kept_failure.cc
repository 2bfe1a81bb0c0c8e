#include "zero/gather/kept_failure.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "comm/control/error_message.h"

namespace tessera::zero {
namespace {

/// What the handler of the process's exit knows. It is never freed: the process ends with it.
struct Untold {
  std::shared_ptr<const std::atomic<bool>> thrown;
  std::string message;
  pid_t process;
};

void at_exit(int status, void* argument) {
  const auto& untold = *static_cast<const Untold*>(argument);
  if (status != 0 || *untold.thrown || untold.process != ::getpid()) return;  // or in a fork
  std::cout.flush();
  std::fprintf(
      stderr,
      "error: %s (met where it could not be thrown, and the program ended without a later call of the "
      "engine)\n",
      untold.message.c_str());
  std::fflush(nullptr);
  ::_exit(1);
}

}  // namespace

void KeptFailure::keep(const std::exception_ptr& failure) {
  if (!failure_) return set(failure, /*thrown=*/false);
  if (failure_ == failure) *thrown_ = false;  // keep_thrown() has had it
}

void KeptFailure::keep_thrown(const std::exception_ptr& failure) {
  if (!failure_) set(failure, /*thrown=*/true);
}

void KeptFailure::set(const std::exception_ptr& failure, bool thrown) {
  failure_ = failure;
  message_ = comm::error_message(failure_);
  thrown_ = std::make_shared<std::atomic<bool>>(thrown);
  ::on_exit(&at_exit, new Untold{thrown_, message_, ::getpid()});
}

void KeptFailure::rethrow() {
  if (!failure_) return;
  was_thrown();
  std::rethrow_exception(failure_);
}

void KeptFailure::clear() {
  if (!*thrown_) rethrow();
  failure_ = nullptr;
  message_.clear();
}

}  // namespace tessera::zero

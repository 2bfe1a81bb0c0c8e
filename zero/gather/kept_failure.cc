#include "zero/gather/kept_failure.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/control/error_message.h"

namespace tessera::zero {
namespace {

/// A failure that was kept, for the handler of the process's exit.
struct Untold {
  std::shared_ptr<const std::atomic<bool>> thrown;
  std::string message;
  pid_t process;
};

struct AllUntold {
  std::mutex mutex;
  std::vector<Untold> failures;
  bool has_handler = false;
};

/// Never destroyed: the handler may run behind all destructors.
AllUntold& all_untold() {
  static auto* const all = new AllUntold;
  return *all;
}

void at_exit(int status, void*) {
  if (status != 0) return;
  for (const Untold& untold : all_untold().failures) {
    if (*untold.thrown || untold.process != ::getpid()) continue;  // or of a parent, in a fork
    std::cout.flush();
    std::fprintf(
        stderr,
        "error: %s (met where it could not be thrown, and the program ended without a later call of the "
        "engine)\n",
        untold.message.c_str());
    std::fflush(nullptr);
    ::_exit(1);
  }
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
  AllUntold& all = all_untold();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.failures, [](const Untold& untold) { return untold.thrown->load(); });
  all.failures.push_back({thrown_, message_, ::getpid()});
  if (!std::exchange(all.has_handler, true)) ::on_exit(&at_exit, nullptr);
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

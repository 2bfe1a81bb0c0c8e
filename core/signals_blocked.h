// SignalsBlocked: for the time in which a thread is started that is to handle no signal.
#pragma once

#include <signal.h>

namespace tessera {

/// Blocks all signals of this thread, and so of the threads that it starts, while it exists: handlers of the
/// process run on its other threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t previous_;
};

}  // namespace tessera

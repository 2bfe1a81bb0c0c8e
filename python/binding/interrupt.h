// Ctrl-C in a collective: what Python's signal handlers raise while a rank waits for others ends the wait.
#pragma once

#include <exception>
#include <functional>

namespace tessera::python {

/// Thrown where a signal handler of Python has raised. It carries no Python object, because an engine that it
/// passes through keeps the exception; the object is kept aside until restore_interrupt().
class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted by a signal"; }
};

/// Is for comm::JoinOptions::interrupt. Runs the handlers of the signals that have come, as Python does
/// between two instructions: on the main thread; elsewhere it does nothing. Takes the GIL. Throws
/// Interrupted.
void check_signals();

/// Sets what the handler raised as Python's current error (KeyboardInterrupt if that was taken
/// already). Needs the GIL.
void restore_interrupt();

}  // namespace tessera::python

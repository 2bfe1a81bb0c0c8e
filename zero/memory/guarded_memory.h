// GuardedMemory: address space that may not be accessed. A resharded unit points here, never at null: code
// that reads its raw pointer dies with a message that names the unit, instead of computing with garbage.
#pragma once

#include <cstddef>
#include <string>

namespace tessera::zero {

/// Reserves address space that ends the process, with a message, when it is accessed. Owns `bytes` of
/// PROT_NONE address space (no memory behind it). The first object installs a SIGSEGV handler that writes
/// `message` for faults inside any live region to stderr, then hands the fault to the handler before it.
/// Neither copied nor moved. Creating and destroying are thread-safe.
class GuardedMemory {
 public:
  /// Throws tessera::Error when the address space cannot be had.
  GuardedMemory(size_t bytes, const std::string& message);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  int entry_ = -1;
};

}  // namespace tessera::zero

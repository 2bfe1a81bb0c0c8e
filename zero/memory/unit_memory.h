// UnitMemory: where one unit's parameters live. The parameters of the model are views into `full()`, whose
// storage can be bound to a buffer (readable) or to guarded address space (shapes only). Autograd's saved
// views share that storage, so they become valid again when the unit is bound anew.
//
// [Note: guarded until it has arrived]
// Having a buffer and being readable are two things. A collective that fills the unit works on the
// buffer itself (contents()), while the storage stays on the guard. So code that reads a raw pointer too
// early dies with a message, and never computes with, or saves, a mixture of old and new values. The
// storage is bound when the collective is done.
//
// While the storage is on the guard, data_ptr() of a parameter throws c10::Error, which Python sees as a
// RuntimeError: numpy(), pickle, torch.save, DLPack and the kernels of a compiled graph ask for it in this
// way. The guard is the last resort, for code that goes past libtorch's checks.
//
// [Note: a failure is thrown by the operator that reads]
// libtorch swallows what a callback throws and runs the operator anyway. So a unit that could not be made
// readable for an operator stays on the guard, and its storage refuses access with the message of what went
// wrong (refuse()). The operator then throws that, in forward as in backward, on any thread, from C++ and
// from Python, because every kernel asks for the data pointer. Nothing is ever computed on other values than
// the unit's. Casts that autocast made of a unit (CastTracker) do the same. What no operator throws in this
// way is kept (kept_failure.h) until a call of the engine throws it.
//
// The storage is of a class of ours, which has a UnitHandle. So "does this tensor belong to a unit, and to
// whose?" is one pointer comparison and works on any thread, for any number of engines in the process,
// without a table. What is compared never changes, so it may be read while another thread binds the storage.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "zero/memory/guarded_memory.h"

namespace tessera::zero {

class Residency;

/// What a storage of ours points back to. Owned by the storage, by UnitMemory, and by what remembers the
/// unit.
struct UnitHandle : std::enable_shared_from_this<UnitHandle> {
  Residency* residency = nullptr;  ///< null once the engine is gone
  int unit = -1;
  at::Tensor buffer;  ///< the unit's memory, readable or not; undefined: released
  std::unique_ptr<GuardedMemory> guard;
  int64_t bytes = 0;
};

/// The handle of the unit whose memory `storage` is, or null.
UnitHandle* find_unit(const c10::StorageImpl& storage);

/// Binds the storage of one unit to a buffer or to guarded memory. Owns the storage binding of one unit. Not
/// thread-safe.
class UnitMemory {
 public:
  struct Options {
    int unit = -1;
    int64_t numel = 0;
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::kCPU;
    std::string description;  ///< for the message of an error or a fault
  };
  explicit UnitMemory(const Options& options);
  ~UnitMemory();
  UnitMemory(UnitMemory&&) noexcept = default;
  UnitMemory(const UnitMemory&) = delete;

  /// (numel) view of the storage; readable only while bound.
  const at::Tensor& full() const { return full_; }
  /// (numel) view of the buffer, not of the storage: for collectives that fill it. Needs a buffer.
  at::Tensor contents() const;
  const at::Tensor& buffer() const { return handle_->buffer; }
  bool has_buffer() const { return handle_->buffer.defined(); }
  bool bound() const { return bound_; }
  int64_t bytes() const { return full_.numel() * full_.element_size(); }

  /// Takes a buffer, in place of the one it had: at least bytes() of memory on the same device,
  /// as a uint8 tensor. Not readable yet.
  void hold(at::Tensor buffer);
  /// Makes the buffer what full() reads.
  void bind();
  void bind(at::Tensor buffer) {
    hold(std::move(buffer));
    bind();
  }
  /// Keeps the buffer; full() is not readable until bind(). See [Note: guarded until it has arrived].
  void guard();
  /// Keeps the buffer; access to full() throws `why` until bind(). See [Note: a failure is thrown by the
  /// operator that reads].
  void refuse(const std::string& why);
  /// Releases the memory and returns the buffer.
  at::Tensor release();

  void set_residency(Residency* residency) { handle_->residency = residency; }

 private:
  void point_to(void* data);

  std::shared_ptr<UnitHandle> handle_;
  at::Tensor full_;
  std::string released_;  // what access says while it is not bound
  bool bound_ = false;
  bool refused_ = false;  // it says something else
};

}  // namespace tessera::zero

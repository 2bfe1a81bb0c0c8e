// HostTransfer: copies between a device's memory and the host's, and what waits for them.
//
// [Note: host transfers]
// Copies run beside the device's work: those to the host one after another, those to the device one after
// another. An Event is a point of that: what was given to a stream before it has been carried out once it has
// passed. A copy starts when the event it is given has passed; who reads what was copied, or writes to what
// a copy reads or wrote, first lets the stream follow the copy's event, or waits for it. So a buffer is
// never used again before the copy that has it has ended, and the thread that calls waits for the device only
// where the host itself reads what came down.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>

namespace tessera::comm {

/// Marks a point in a stream of the device. Immutable.
class Event {
 public:
  virtual ~Event() = default;
};
/// Null: an event that has passed.
using EventPtr = std::shared_ptr<const Event>;

/// Copies between the device and the host. Thread-safe. What fails on the device throws Error or c10::Error,
/// from these or later calls.
class HostTransfer {
 public:
  virtual ~HostTransfer() = default;

  /// (bytes) uint8 of the host's memory, zeros, page-aligned. Throws Error when there is no room.
  virtual at::Tensor host_memory(int64_t bytes) = 0;
  /// Returns how much of host_memory() there is that the device reads and writes without a detour.
  virtual int64_t pinned_bytes() const = 0;

  /// Returns the point of this thread's current stream that it has been given so far.
  virtual EventPtr record() = 0;
  /// Begins a copy of contiguous tensors of one dtype and length, after `after`, and returns its end.
  virtual EventPtr d2h(const at::Tensor& host, const at::Tensor& device, const EventPtr& after) = 0;
  virtual EventPtr h2d(const at::Tensor& device, const at::Tensor& host, const EventPtr& after) = 0;
  /// Makes this thread's current stream wait for `event`.
  virtual void wait(const EventPtr& event) = 0;
  /// Calls `issue`: what it gives to the current stream comes after what that was given before and after
  /// `event`; what comes later does not wait for it. For collectives; returns the end of what was given to
  /// the stream itself. One thread at a time.
  virtual EventPtr issue_after(const EventPtr& event, c10::function_ref<void()> issue) = 0;
  virtual bool query(const EventPtr& event) = 0;
  /// Blocks this thread until the event has passed, or until all copies have ended.
  virtual void synchronize(const EventPtr& event) = 0;
  virtual void synchronize() = 0;
};

}  // namespace tessera::comm

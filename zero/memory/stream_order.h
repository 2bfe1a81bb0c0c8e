// StreamOrder: one order for what is given to several streams of a device.
//
// A model may run parts of itself on streams of its own, and autograd runs a part's backward on the part's
// stream. A unit's buffer, read on one stream, is then gathered into anew on another one; gradients of one
// unit come on several. What is read or written next therefore first follows the stream before it: at each
// use of a unit, at each gather, and at each gradient. Where the stream is the same, as in most models, that
// is a comparison. The allocator gives memory that is freed to the next request of the stream it was made on;
// so once there are several, it is told of memory that another one uses.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

namespace tessera::zero {

/// Orders the work of several streams on the same memory. Not thread-safe. Streams have to outlive it. Does
/// nothing where the device is the CPU.
class StreamOrder {
 public:
  explicit StreamOrder(c10::Device device) : device_(device) {}
  /// What is given to this thread's current stream from now on comes after what has been given so far
  /// to the stream that was current in the call before.
  void follow();
  /// Work on this thread's current stream uses the memory: when it is freed, it is not used anew
  /// before what has been given to that stream by then is done.
  void uses(const at::DataPtr& memory) const;
  void uses(const at::Tensor& tensor) const {
    if (several_ && tensor.has_storage()) uses(tensor.storage().data_ptr());
  }

 private:
  c10::Device device_;
  std::optional<c10::Stream> last_;
  bool several_ = false;  // streams have been seen
};

}  // namespace tessera::zero

// Device: what the ranks of one host need of a device to exchange data without a library: memory that other
// processes map, a stream with copies and sums, and flags in the host's memory for which a stream waits.
//
// There are two: CUDA (cuda_device.h), and one whose memory is the host's and whose stream is a thread
// (host_device.h), over which the tests run the protocol (group.h) where there is no GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/p2p/flags.h"
#include "comm/shm/reduce.h"
#include "core/files/file_descriptor.h"

namespace tessera::comm::p2p {

/// Device memory that this process has mapped. Freed on destruction: nothing on the device may use it then.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual std::byte* data() const = 0;
};

/// A point in a stream. Immutable; thread-safe.
class Moment {
 public:
  virtual ~Moment() = default;
  /// What the stream was given before has been carried out.
  virtual bool passed() = 0;
  /// What the calling thread's current stream is given from now on comes after this moment. A device
  /// without such streams blocks, and returns false when the moment has not passed after `limit`.
  virtual bool order_current(std::chrono::milliseconds limit) = 0;
};
using MomentPtr = std::shared_ptr<Moment>;

/// Carries out what it is given in order, beside the calling thread. One thread at a time, except idle(). All
/// members throw Error when the device refuses. Memory must stay until the stream has passed.
class Stream {
 public:
  virtual ~Stream() = default;
  /// What comes next comes after what the calling thread's current stream has been given so far.
  virtual void follow_current() = 0;
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;
  /// shm::reduce(), bit for bit, but for the bits of a NaN. At most kMaxRanks inputs.
  virtual void reduce(const shm::Reduction& reduction) = 0;
  /// The flag becomes `number`, once all that came before is visible to the host and to other devices: its
  /// lower half, then, `with_upper`, the upper one, which is to be written when it changes.
  virtual void write(Flag& flag, uint64_t number, bool with_upper) = 0;
  /// What comes next waits until the flag is at least `number`, or released.
  virtual void wait(const Flag& flag, uint64_t number) = 0;
  virtual MomentPtr now() = 0;
  /// All has been carried out.
  virtual bool idle() = 0;
};

/// Thread-safe; shared by the groups of a rank.
class Device {
 public:
  virtual ~Device() = default;
  /// Of its tensors.
  virtual at::Device place() const = 0;
  /// Bytes of each half of a group's mailbox (group.h).
  virtual int64_t half_mailbox_bytes() const = 0;

  /// At least `bytes`, above 0; not initialised. Throws CommError when there is no room.
  virtual std::shared_ptr<Memory> allocate(int64_t bytes) = 0;
  /// A descriptor of memory from allocate(), by which other processes map it; once.
  virtual FileDescriptor share(Memory& memory) = 0;
  /// Maps what another rank has allocated with the same `bytes`. The memory lasts as long as a process
  /// has it mapped, whatever becomes of the one that allocated it. Throws CommError.
  virtual std::shared_ptr<Memory> adopt(FileDescriptor fd, int64_t bytes) = 0;

  /// Lets streams write and wait for the flags in [data, data + bytes), whole pages of the host's
  /// memory, until what it returns is destroyed. Throws CommError.
  virtual std::shared_ptr<void> register_flags(std::byte* data, int64_t bytes) = 0;
  virtual std::unique_ptr<Stream> make_stream() = 0;
};

}  // namespace tessera::comm::p2p

// MemoryMeter: how much memory of a device the tensors of this rank hold, by
// use: now, at the peak, and over time.
//
// [Note: where the numbers come from]
// libtorch's allocators, CPU and CUDA alike, report every block they give and take back to
// c10::MemoryReportingInfoBase, through which its profiler works too; memory shared by the ranks (comm/shm)
// is reported the same way, divided by the number of ranks that share it. The use of a block is what the
// MemoryFor scope around its allocation says (core/memory_use.h), or else the meter's default. So the uses
// add up to the allocator's total by construction, and without a meter nothing is reported and nothing costs.
//
// Reports come to the meter of the thread that allocates, and to the threads on which autograd goes on with
// its work. A block that another thread gives back stays in the books until its address is given out again.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/memory_use.h"

namespace tessera {

/// What was held from `seconds` after record() on, until the next sample.
struct MemorySample {
  double seconds = 0;
  MemoryBytes bytes;
};

/// Constructed and destroyed on one thread; meters nest (the inner one gets the
/// reports). The rest from any thread.
class MemoryMeter {
 public:
  /// Local. Counts from here on what is allocated on devices of this type.
  explicit MemoryMeter(c10::DeviceType device);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Local. What blocks are for that are allocated outside of a MemoryFor from here on. At first kOther.
  void set_default_use(MemoryUse use);

  MemoryBytes now() const;
  /// Local. What was held when the total was largest, since the beginning or reset_peak().
  MemoryBytes peak() const;
  void reset_peak();
  /// Local. What was held when the device had no more to give; none as long as it had.
  std::optional<MemoryBytes> at_failure() const;
  /// Local. CUDA: the most bytes that libtorch's caching allocator had reserved, 0 on the CPU.
  int64_t peak_reserved() const;

  /// Local. Starts a record of every change; take_record() ends it.
  void record();
  std::vector<MemorySample> take_record();

 private:
  class Books;
  class Scope;
  std::shared_ptr<Books> books_;
  std::unique_ptr<Scope> scope_;
};

}  // namespace tessera

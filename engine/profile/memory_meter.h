// MemoryMeter: how much memory of a device the tensors of this rank hold, by use: now, at the peak, and over
// time.
//
// [Note: where the numbers come from]
// libtorch's allocators, on the CPU and on CUDA, report every block they allocate and free to
// c10::MemoryReportingInfoBase, which its profiler uses too. Memory that ranks share (comm/shm/shm) is
// reported the same way, divided by the number of ranks that share it. The use of a block is that of the
// MemoryFor scope around its allocation (core/memory/memory_use.h), or else the meter's default. So the uses
// add up to the allocator's total by construction; without a meter nothing is reported, and there is no cost.
//
// A thread's reports go to its meter, and so do those of the threads on which autograd continues its work. A
// block that another thread frees stays counted until its address is allocated again.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/memory/memory_use.h"

namespace tessera {

/// The bytes held from `seconds` after record() until the next sample.
struct MemorySample {
  double seconds = 0;
  MemoryBytes bytes;
};

/// Counts this process's memory by what it is for. Constructed and destroyed on one thread; other calls may
/// come from any thread. Meters nest: the inner one gets the reports.
class MemoryMeter {
 public:
  /// Counts allocations on devices of this type from now on.
  explicit MemoryMeter(c10::DeviceType device);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// The use of blocks that are allocated outside of a MemoryFor from now on. At first kOther.
  void set_default_use(MemoryUse use);

  MemoryBytes now() const;
  /// The bytes held when the total was largest, since the beginning or reset_peak().
  MemoryBytes peak() const;
  void reset_peak();
  /// The bytes held when the device ran out of memory; unset if it has not.
  std::optional<MemoryBytes> at_failure() const;
  /// CUDA: the most bytes that libtorch's caching allocator had reserved, 0 on the CPU.
  int64_t peak_reserved() const;

  /// Starts a record of every change; take_record() ends it.
  void record();
  std::vector<MemorySample> take_record();

 private:
  class Books;
  class Scope;
  std::shared_ptr<Books> books_;
  std::unique_ptr<Scope> scope_;
};

}  // namespace tessera

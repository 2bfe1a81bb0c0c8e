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
//
// [Note: what a record knows of a block]
// The unit is that of the MemoryForUnit scope around the allocation (core/memory/allocation_failure.h). While
// a record is made, operators are heard too (operator_origin.h), so that a block has the operator and the
// module that allocated it. Blocks that are older have neither.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/memory/memory_use.h"
#include "zero/operators/tap.h"
#include "zero/plan/layout.h"

namespace c10 {
class DebugInfoGuard;
}

namespace tessera {

/// The bytes held from `seconds` after record() until the next sample.
struct MemorySample {
  double seconds = 0;
  MemoryBytes bytes;
};

/// A block of memory that was held during a record. The names are places in MemoryRecord::names; -1: none.
struct MemoryBlock {
  int64_t bytes = 0;
  MemoryUse use = MemoryUse::kOther;
  double begin_s = 0;  ///< 0: it was there when the record began
  double end_s = -1;   ///< -1: it was there when the record ended
  int unit = -1;       ///< "unit 3 (a.weight … b.bias)"; of a buffer for several units the first
  int module = -1;     ///< whose parameter was read last: "encoder.0.linear"; in backward that of the forward
  int op = -1;         ///< the outermost operator, or node of backward: "aten::linear", "AddmmBackward0"
  bool in_call = false;  ///< freed before `op` returned
};

/// What was allocated and freed from record() to take_record().
struct MemoryRecord {
  struct Change {
    double seconds;
    int block;  ///< place in `blocks`
    bool begins;
  };
  double seconds = 0;               ///< the length
  std::vector<MemoryBlock> blocks;  ///< those that were there at the beginning, and then by `begin_s`
  std::vector<Change> changes;      ///< in the order in which they came
  std::vector<std::string> names;

  /// The bytes at the beginning and after each change.
  std::vector<MemorySample> samples() const;
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

  /// Starts a record of every change; take_record() ends it. Both are called by the thread that runs the
  /// model. `layout`: of the model whose modules are to be named; it lives until take_record().
  void record(const zero::Layout* layout = nullptr);
  MemoryRecord take_record();

  class Tracker;

 private:
  std::shared_ptr<Tracker> tracker_;
  std::unique_ptr<c10::DebugInfoGuard> scope_;
  std::unique_ptr<zero::Hearing> hearing_;  // while it records
};

}  // namespace tessera

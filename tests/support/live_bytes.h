// LiveBytes: how much CPU memory tensors made on this thread hold, now and at most, from libtorch's own allocator.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

namespace tessera::testing {

/// Counts allocations between construction and destruction, on the thread that made it.
class LiveBytes {
 public:
  LiveBytes() : report_(std::make_shared<Report>()), guard_(c10::DebugInfoKind::PROFILER_STATE, report_) {}

  int64_t now() const { return report_->now; }
  int64_t peak() const { return report_->peak; }
  void reset_peak() { report_->peak = report_->now; }

 private:
  struct Report : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* pointer, int64_t size, size_t, size_t, c10::Device) override {
      if (size > 0) {
        sizes[pointer] = size;
        now += size;
      } else if (const auto found = sizes.find(pointer); found != sizes.end()) {
        now -= found->second;
        sizes.erase(found);
      }
      peak = std::max(peak, now);
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::unordered_map<void*, int64_t> sizes;
    int64_t now = 0, peak = 0;
  };
  std::shared_ptr<Report> report_;
  c10::DebugInfoGuard guard_;
};

}  // namespace tessera::testing

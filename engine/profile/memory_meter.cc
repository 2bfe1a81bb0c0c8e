#include "engine/profile/memory_meter.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tessera {

/// [Note: where the numbers come from]
class MemoryMeter::Books final : public c10::MemoryReportingInfoBase {
 public:
  explicit Books(c10::DeviceType device) : device_(device) {}

  bool memoryProfilingEnabled() const override { return true; }

  void reportMemoryUsage(void* data, int64_t bytes, size_t, size_t total_reserved,
                         c10::Device device) override {
    if (device.type() != device_ || bytes == 0) return;
    const std::lock_guard lock(mutex_);
    peak_reserved_ = std::max(peak_reserved_, static_cast<int64_t>(total_reserved));
    take_back(data);
    if (bytes > 0) {
      const Block block{MemoryFor::current().value_or(default_use_), bytes};
      blocks_.emplace(data, block);
      now_[block.use] += bytes;
      total_ += bytes;
      if (total_ > peak_total_) {
        peak_total_ = total_;
        peak_ = now_;
      }
    }
    if (recording_) record_.push_back({std::chrono::duration<double>(Clock::now() - start_).count(), now_});
  }

  void reportOutOfMemory(int64_t, size_t, size_t, c10::Device device) override {
    if (device.type() != device_) return;
    const std::lock_guard lock(mutex_);
    at_failure_ = now_;
  }

  void set_default_use(MemoryUse use) {
    const std::lock_guard lock(mutex_);
    default_use_ = use;
  }
  MemoryBytes now() const {
    const std::lock_guard lock(mutex_);
    return now_;
  }
  MemoryBytes peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = now_;
    peak_total_ = total_;
  }
  int64_t peak_reserved() const {
    const std::lock_guard lock(mutex_);
    return peak_reserved_;
  }
  std::optional<MemoryBytes> at_failure() const {
    const std::lock_guard lock(mutex_);
    return at_failure_;
  }
  void record() {
    const std::lock_guard lock(mutex_);
    recording_ = true;
    start_ = Clock::now();
    record_ = {{0, now_}};
  }
  std::vector<MemorySample> take_record() {
    const std::lock_guard lock(mutex_);
    recording_ = false;
    return std::exchange(record_, {});
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Block {
    MemoryUse use;
    int64_t bytes;
  };

  /// Also for a block whose end was not reported here: its address is allocated again. Unknown blocks are
  /// older than the meter.
  void take_back(void* data) {
    const auto found = blocks_.find(data);
    if (found == blocks_.end()) return;
    now_[found->second.use] -= found->second.bytes;
    total_ -= found->second.bytes;
    blocks_.erase(found);
  }

  const c10::DeviceType device_;
  mutable std::mutex mutex_;  // guards all below
  MemoryUse default_use_ = MemoryUse::kOther;
  std::unordered_map<void*, Block> blocks_;
  MemoryBytes now_, peak_;
  std::optional<MemoryBytes> at_failure_;
  int64_t total_ = 0, peak_total_ = 0, peak_reserved_ = 0;
  bool recording_ = false;
  Clock::time_point start_;
  std::vector<MemorySample> record_;
};

class MemoryMeter::Scope {
 public:
  explicit Scope(std::shared_ptr<Books> books)
      : guard_(c10::DebugInfoKind::PROFILER_STATE, std::move(books)) {}

 private:
  c10::DebugInfoGuard guard_;
};

MemoryMeter::MemoryMeter(c10::DeviceType device)
    : books_(std::make_shared<Books>(device)), scope_(std::make_unique<Scope>(books_)) {}
MemoryMeter::~MemoryMeter() = default;

void MemoryMeter::set_default_use(MemoryUse use) { books_->set_default_use(use); }
MemoryBytes MemoryMeter::now() const { return books_->now(); }
MemoryBytes MemoryMeter::peak() const { return books_->peak(); }
void MemoryMeter::reset_peak() { books_->reset_peak(); }
std::optional<MemoryBytes> MemoryMeter::at_failure() const { return books_->at_failure(); }
int64_t MemoryMeter::peak_reserved() const { return books_->peak_reserved(); }
void MemoryMeter::record() { books_->record(); }
std::vector<MemorySample> MemoryMeter::take_record() { return books_->take_record(); }

}  // namespace tessera

#include "engine/profile/memory_meter.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "core/memory/allocation_failure.h"
#include "engine/profile/operator_origin.h"

namespace tessera {

/// [Note: where the numbers come from]
class MemoryMeter::Tracker final : public c10::MemoryReportingInfoBase {
 public:
  explicit Tracker(c10::DeviceType device) : device_(device) {}

  bool memoryProfilingEnabled() const override { return true; }

  void reportMemoryUsage(void* data, int64_t bytes, size_t, size_t total_reserved,
                         c10::Device device) override {
    if (device.type() != device_ || bytes == 0) return;
    const std::lock_guard lock(mutex_);
    peak_reserved_ = std::max(peak_reserved_, static_cast<int64_t>(total_reserved));
    const double seconds = recording_ ? std::chrono::duration<double>(Clock::now() - start_).count() : 0;
    take_back(data, seconds);
    if (bytes > 0) {
      const std::string* const unit = MemoryForUnit::current();
      Block block{{.bytes = bytes, .use = MemoryFor::current().value_or(default_use_)}};
      if (unit != nullptr) block.unit = intern(*unit);
      if (recording_) begin_in_record(block, seconds);
      blocks_.emplace(data, block);
      now_[block.use] += bytes;
      total_ += bytes;
      if (total_ > peak_total_) {
        peak_total_ = total_;
        peak_ = now_;
      }
    }
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
  void record(const zero::Layout* layout) {
    const auto number = [this](const std::string& name) {
      const std::lock_guard lock(mutex_);
      return intern(name);
    };
    auto origin = std::make_unique<OperatorOrigin>(layout, number);
    const std::lock_guard lock(mutex_);
    origin_ = std::move(origin);
    record_ = {};
    for (auto& [data, block] : blocks_) {
      block.place = static_cast<int>(record_.blocks.size());
      record_.blocks.push_back(block);
    }
    recording_ = true;
    start_ = Clock::now();
  }
  MemoryRecord take_record() {
    const std::lock_guard lock(mutex_);
    if (recording_) record_.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    recording_ = false;
    for (auto& [data, block] : blocks_) block.place = -1;
    record_.names = names_;
    return std::exchange(record_, {});
  }

  /// Those of the meter that hears this thread, while it records; else null.
  static OperatorOrigin* origin_here() {
    const auto* tracker =
        dynamic_cast<Tracker*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
    return tracker == nullptr ? nullptr : tracker->origin_.get();
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Block : MemoryBlock {
    int place = -1;     // in the record
    uint64_t call = 0;  // OperatorOrigin::Place::call
  };

  int intern(const std::string& name) {
    const auto [entry, is_new] = numbers_.try_emplace(name, static_cast<int>(names_.size()));
    if (is_new) names_.push_back(name);
    return entry->second;
  }

  void begin_in_record(Block& block, double seconds) {
    const OperatorOrigin::Place& origin = OperatorOrigin::here();
    block.begin_s = seconds;
    block.op = origin.op;
    block.module = origin.module;
    block.call = origin.call;
    block.place = static_cast<int>(record_.blocks.size());
    record_.blocks.push_back(block);
    record_.changes.push_back({seconds, block.place, true});
  }

  /// Also for a block whose end was not reported here: its address is allocated again. Unknown blocks are
  /// older than the meter.
  void take_back(void* data, double seconds) {
    const auto found = blocks_.find(data);
    if (found == blocks_.end()) return;
    const Block& block = found->second;
    now_[block.use] -= block.bytes;
    total_ -= block.bytes;
    if (recording_ && block.place >= 0) {
      MemoryBlock& recorded = record_.blocks[static_cast<size_t>(block.place)];
      recorded.end_s = seconds;
      recorded.in_call = block.call != 0 && block.call == OperatorOrigin::here().call;
      record_.changes.push_back({seconds, block.place, false});
    }
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
  MemoryRecord record_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, int> numbers_;  // of names_
  std::unique_ptr<OperatorOrigin> origin_;        // stays after a record: a thread may be in an operator
};

namespace {

/// Tells the meter that hears the thread, if it records.
class OriginObserver final : public zero::OperatorObserver {
 public:
  static OriginObserver& of_process() {
    static OriginObserver& observer = *new OriginObserver;
    return observer;
  }
  std::unique_ptr<at::ObserverContext> begin(const zero::OperatorCall& call) override {
    if (OperatorOrigin* const origin = MemoryMeter::Tracker::origin_here()) origin->begin(call);
    return nullptr;
  }
  void end(const zero::OperatorCall&, at::ObserverContext*) override {
    if (OperatorOrigin* const origin = MemoryMeter::Tracker::origin_here()) origin->end();
  }
};

}  // namespace

MemoryMeter::MemoryMeter(c10::DeviceType device)
    : tracker_(std::make_shared<Tracker>(device)),
      scope_(std::make_unique<c10::DebugInfoGuard>(c10::DebugInfoKind::PROFILER_STATE, tracker_)) {}
MemoryMeter::~MemoryMeter() = default;

void MemoryMeter::set_default_use(MemoryUse use) { tracker_->set_default_use(use); }
MemoryBytes MemoryMeter::now() const { return tracker_->now(); }
MemoryBytes MemoryMeter::peak() const { return tracker_->peak(); }
void MemoryMeter::reset_peak() { tracker_->reset_peak(); }
std::optional<MemoryBytes> MemoryMeter::at_failure() const { return tracker_->at_failure(); }
int64_t MemoryMeter::peak_reserved() const { return tracker_->peak_reserved(); }
void MemoryMeter::record(const zero::Layout* layout) {
  tracker_->record(layout);
  hearing_ = std::make_unique<zero::Hearing>(zero::Turn::kOrigin, OriginObserver::of_process(),
                                             zero::Needs{.nodes = true});
}
MemoryRecord MemoryMeter::take_record() {
  hearing_.reset();
  return tracker_->take_record();
}

std::vector<MemorySample> MemoryRecord::samples() const {
  MemorySample now;
  for (const MemoryBlock& block : blocks) now.bytes[block.use] += block.bytes;
  for (const Change& change : changes)
    if (change.begins) {
      const MemoryBlock& block = blocks[static_cast<size_t>(change.block)];
      now.bytes[block.use] -= block.bytes;
    }
  std::vector<MemorySample> all = {now};
  for (const Change& change : changes) {
    const MemoryBlock& block = blocks[static_cast<size_t>(change.block)];
    now.bytes[block.use] += change.begins ? block.bytes : -block.bytes;
    now.seconds = change.seconds;
    all.push_back(now);
  }
  return all;
}

}  // namespace tessera

#include "tools/memory/memory_report.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "core/str.h"
#include "core/terminal.h"
#include "tools/common/columns.h"

namespace tessera::tools {
namespace {

using train::MemoryTrial;

constexpr size_t kLabelWidth = 28;
constexpr size_t kCellWidth = 13;
constexpr size_t kMaxBarWidth = 50;
constexpr size_t kBesideBar = 18;  // "stage 0 " and the number
constexpr const char* kBarMarks[kNumMemoryUses] = {"█", "▓", "▚", "▒", "▞", "≡", "╳", "░", "·"};

struct UnitOfBytes {
  double bytes;
  const char* name;
};

UnitOfBytes unit_for(const MemoryTrials& trials) {
  int64_t largest = 0;
  for (const auto& [stage, ranks] : trials)
    for (const MemoryTrial& trial : ranks)
      largest = std::max({largest, trial.peak.total(), trial.process_peak});
  return largest >= 10'000'000'000 ? UnitOfBytes{1e9, "GB"}
         : largest >= 10'000'000   ? UnitOfBytes{1e6, "MB"}
                                   : UnitOfBytes{1e3, "kB"};
}

using Value = std::function<double(const MemoryTrial&)>;

/// "269.4", or "250.1-269.4" where ranks differ.
std::string range_of(const std::vector<MemoryTrial>& ranks, double unit, const Value& value) {
  double least = value(ranks.front()), most = least;
  for (const MemoryTrial& trial : ranks) {
    least = std::min(least, value(trial));
    most = std::max(most, value(trial));
  }
  const auto text = [&](int digits) {
    const std::string low = fixed(least / unit, digits), high = fixed(most / unit, digits);
    return low == high ? high : str(low, "-", high);
  };
  const std::string exact = text(1);
  return exact.size() < kCellWidth ? exact : text(0);  // a space between columns
}

/// Returns the rank with the greatest peak of each stage, in the order of stages.
std::vector<const MemoryTrial*> largest_by_stage(const MemoryTrials& trials) {
  std::vector<const MemoryTrial*> largest;
  for (const auto& [stage, ranks] : trials)
    largest.push_back(&*std::max_element(
        ranks.begin(), ranks.end(),
        [](const MemoryTrial& a, const MemoryTrial& b) { return a.peak.total() < b.peak.total(); }));
  return largest;
}

/// Stages in columns; where the terminal has no room for all of them, some stand below the others.
class Table {
 public:
  Table(const MemoryTrials& trials, int width)
      : trials_(trials),
        any_(trials.begin()->second.front()),
        unit_(unit_for(trials)),
        width_(static_cast<size_t>(std::max(width, kMinWidth))) {}

  std::string text() {
    std::string out = wrap_words(title(), static_cast<int>(width_), 2) + "\n";
    const size_t at_once = (width_ - kLabelWidth) / kCellWidth;
    for (size_t first = 0; first < trials_.size(); first += at_once) {
      columns_.clear();
      for (auto trial = std::next(trials_.begin(), static_cast<int64_t>(first));
           trial != trials_.end() && columns_.size() < at_once; ++trial)
        columns_.push_back(&trial->second);
      out += "\n" + stages() + in_memory() + "\n" + on_host() + on_disk();
    }
    return out + bars();
  }

 private:
  static constexpr int kMinWidth = 54;  // two stages
  using Ranks = std::vector<MemoryTrial>;

  std::string title() const {
    const std::string activations = any_.activations == "none" ? "" : str(", activations ", any_.activations);
    return str(unit_.name, " a rank at the peak of a step: ", any_.world_size,
               any_.world_size == 1 ? " rank" : " ranks", " (", any_.backend, "), ", any_.precision, ", ",
               any_.optimizer, activations);
  }

  std::string stages() const {
    return row("", [](const Ranks& ranks) { return str("stage ", ranks.front().stage); });
  }

  std::string in_memory() const {
    std::string out;
    for (size_t use = 0; use < kNumMemoryUses; ++use)
      if (is_used(use))
        out += bytes_row(std::string(name_of(static_cast<MemoryUse>(use))),
                         [use](const MemoryTrial& trial) { return trial.peak.by_use[use]; });
    out += bytes_row("= allocator's peak", [](const MemoryTrial& trial) { return trial.peak.total(); });
    if (on_cuda()) {
      out += bytes_row("reserved by the allocator",
                       [](const MemoryTrial& trial) { return trial.peak_reserved; });
      out += bytes_row("  above its peak", [](const MemoryTrial& trial) {
        return std::max<int64_t>(0, trial.peak_reserved - trial.peak.total());
      });
    }
    out += "\n";
    if (on_cuda()) {
      out +=
          bytes_row("model state, in blocks", [](const MemoryTrial& trial) { return trial.model_state(); });
      out += bytes_row("  rounded up by", [](const MemoryTrial& trial) { return trial.rounding; });
    }
    out += state_rows([](const MemoryTrial& trial) { return trial.model_state() - trial.rounding; },
                      [](const MemoryTrial& trial) { return trial.formula.total(); });
    out += bytes_row("process, over idle", [](const MemoryTrial& trial) { return trial.process_peak; });
    out += row("a step, ms", [](const Ranks& ranks) {
      return range_of(ranks, 1, [](const MemoryTrial& trial) { return trial.step_ms; });
    });
    return out;
  }

  bool on_cuda() const { return any_.device == "cuda"; }

  /// What the tiers below have. `tier`: MemoryTrial::host or disk.
  template <class Tier>
  std::string held_rows(Tier MemoryTrial::* tier) const {
    std::string out;
    for (const auto& [use, bytes] : {std::pair{MemoryUse::kParameters, &zero::StateBytes::parameters},
                                     {MemoryUse::kGradients, &zero::StateBytes::gradients},
                                     {MemoryUse::kMaster, &zero::StateBytes::master},
                                     {MemoryUse::kOptimizer, &zero::StateBytes::optimizer}})
      if (std::any_of(trials_.begin(), trials_.end(), [tier, bytes = bytes](const auto& stage) {
            return (stage.second.front().*tier).held.*bytes != 0;
          }))
        out += bytes_row(std::string(name_of(use)), [tier, bytes = bytes](const MemoryTrial& trial) {
          return (trial.*tier).held.*bytes;
        });
    return out + state_rows([tier](const MemoryTrial& trial) { return (trial.*tier).held.total(); },
                            [tier](const MemoryTrial& trial) { return (trial.*tier).formula.total(); });
  }

  /// Empty where nothing is in the host's memory, or on disk.
  std::string on_host() const {
    if (!any_.host.used) return "";
    return str(unit_.name, " a rank in the host's memory, between steps\n") + held_rows(&MemoryTrial::host) +
           bytes_row("page-locked, with buffers",
                     [](const MemoryTrial& trial) { return trial.host.pinned; }) +
           "\n";
  }
  std::string on_disk() const {
    if (!any_.disk.used) return "";
    std::string out = str(unit_.name, " a rank on disk, between steps\n") + held_rows(&MemoryTrial::disk);
    out += bytes_row("the file, by the kernel", [](const MemoryTrial& trial) { return trial.disk.file; });
    out += bytes_row("buffers by buffer_count",
                     [](const MemoryTrial& trial) { return trial.disk.buffers_limit; });
    out += bytes_row("read by a step", [](const MemoryTrial& trial) { return trial.disk.read; });
    return out + bytes_row("written by a step", [](const MemoryTrial& trial) { return trial.disk.written; }) +
           "\n";
  }

  template <class Measured, class Formula>
  std::string state_rows(const Measured& measured, const Formula& formula) const {
    return bytes_row("model state, measured", measured) + bytes_row("  by formula", formula) +
           row("  difference", [&](const Ranks& ranks) {
             double worst = 0;
             for (const MemoryTrial& trial : ranks) {
               if (formula(trial) == 0) continue;
               const double relative =
                   static_cast<double>(measured(trial)) / static_cast<double>(formula(trial)) - 1;
               if (std::abs(relative) > std::abs(worst)) worst = relative;
             }
             return fixed(worst * 100, 2) + " %";
           });
  }

  bool is_used(size_t use) const {
    for (const auto& [stage, ranks] : trials_)
      for (const MemoryTrial& trial : ranks)
        if (trial.peak.by_use[use] != 0) return true;
    return false;
  }

  std::string row(const std::string& label,
                  const std::function<std::string(const Ranks& ranks)>& cell) const {
    std::string line = padded_right(label, kLabelWidth);
    for (const Ranks* ranks : columns_) line += padded_left(cell(*ranks), kCellWidth);
    return line + "\n";
  }
  template <class Bytes>
  std::string bytes_row(const std::string& label, const Bytes& bytes) const {
    return row(label, [&](const Ranks& ranks) {
      return range_of(ranks, unit_.bytes,
                      [&](const MemoryTrial& trial) { return static_cast<double>(bytes(trial)); });
    });
  }

  std::string bars() const {
    const auto largest = largest_by_stage(trials_);
    const double bar_width = static_cast<double>(std::min(kMaxBarWidth, width_ - kBesideBar));
    double widest = 1;
    std::array<bool, kNumMemoryUses> shown{};
    for (const MemoryTrial* trial : largest)
      widest = std::max(widest, static_cast<double>(trial->peak.total()));
    std::string out;
    for (const MemoryTrial* trial : largest) {
      out += str("stage ", trial->stage, " ");
      double bytes = 0;
      size_t drawn = 0;
      for (size_t use = 0; use < kNumMemoryUses; ++use) {
        bytes += static_cast<double>(trial->peak.by_use[use]);
        const auto end = static_cast<size_t>(std::llround(bytes / widest * bar_width));
        shown[use] = shown[use] || end > drawn;
        for (; drawn < end; ++drawn) out += kBarMarks[use];
      }
      out += str(" ", fixed(static_cast<double>(trial->peak.total()) / unit_.bytes, 1), "\n");
    }
    std::string line;
    size_t width = 0;
    for (size_t use = 0; use < kNumMemoryUses; ++use) {
      if (!shown[use]) continue;
      const std::string_view name = name_of(static_cast<MemoryUse>(use));
      if (width + name.size() + 4 > width_ - 1) line += "\n", width = 0;
      line += str(width == 0 ? "" : "  ", kBarMarks[use], " ", name);
      width += name.size() + 4;
    }
    return out + line + "\n";
  }

  const MemoryTrials& trials_;
  const MemoryTrial& any_;
  const UnitOfBytes unit_;
  const size_t width_;
  std::vector<const Ranks*> columns_;  // the stages that are being written
};

}  // namespace

std::string memory_table(const MemoryTrials& trials, int width) { return Table(trials, width).text(); }

nlohmann::ordered_json memory_json(const MemoryTrials& trials) {
  nlohmann::ordered_json json;
  json["unit"] = "bytes";
  json["timeline_columns"] = {"seconds"};
  for (size_t use = 0; use < kNumMemoryUses; ++use)
    json["timeline_columns"].push_back(key_of(static_cast<MemoryUse>(use)));
  for (const auto& [stage, ranks] : trials)
    for (const MemoryTrial& trial : ranks) json["trials"].push_back(to_json(trial));
  return json;
}

}  // namespace tessera::tools

#include "train/memory/memory_timeline.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "core/json/json_text.h"

namespace tessera::train {
namespace {

using nlohmann::ordered_json;

enum Category : size_t {
  kParameters,
  kGathered,
  kGradients,
  kMaster,
  kOptimizer,
  kSnapshot,
  kCommunication,
  kDiskBuffers,
  kActivations,
  kWorkspace,
  kOther,
};

constexpr std::array<MemoryCategory, kNumMemoryCategories> kCategories = {{
    {"parameters", "parameters"},
    {"gathered", "gathered units"},
    {"gradients", "gradients"},
    {"master", "master weights"},
    {"optimizer", "optimizer state"},
    {"snapshot", "checkpoint snapshot"},
    {"communication", "communication buffers"},
    {"disk_buffers", "buffers for the disk"},
    {"activations", "activations"},
    {"workspace", "workspace of operators"},
    {"other", "buffers and data"},
}};

/// A block of timeline_json().
enum Column : size_t { kBegin, kEnd, kBytes, kCategory, kUnit, kModule, kOperator };

int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

using Totals = std::array<int64_t, kNumMemoryCategories>;
int64_t sum_of(const Totals& totals) {
  int64_t sum = 0;
  for (const int64_t bytes : totals) sum += bytes;
  return sum;
}

/// The blocks' begins and ends in the order of time; what ends goes before what begins at the same time.
struct Event {
  int64_t at;
  bool begins;
  size_t block;
  bool operator<(const Event& other) const {
    return std::pair(at, begins) < std::pair(other.at, other.begins);
  }
};

std::vector<Event> events_of(const ordered_json& timeline) {
  std::vector<Event> events;
  const ordered_json& blocks = timeline.at("blocks");
  for (size_t i = 0; i < blocks.size(); ++i) {
    const ordered_json& block = blocks[i];
    events.push_back({block[kBegin], true, i});
    if (!block[kEnd].is_null()) events.push_back({block[kEnd], false, i});
  }
  std::stable_sort(events.begin(), events.end());
  return events;
}

/// Calls `visit(time, totals)` for the beginning and after each event that follows.
template <class Visit>
void walk(const ordered_json& timeline, const std::vector<Event>& events, const Visit& visit) {
  Totals totals{};
  size_t next = 0;
  const auto take = [&](const Event& event) {
    const ordered_json& block = timeline.at("blocks")[event.block];
    totals[block[kCategory].get<size_t>()] += (event.begins ? 1 : -1) * block[kBytes].get<int64_t>();
  };
  for (; next < events.size() && events[next].at == 0 && events[next].begins; ++next) take(events[next]);
  visit(int64_t{0}, totals);
  for (; next < events.size(); ++next) {
    take(events[next]);
    visit(events[next].at, totals);
  }
}

std::string name_at(const ordered_json& timeline, const ordered_json& place, const char* otherwise) {
  return place.get<int>() < 0 ? otherwise : timeline.at("names")[place.get<size_t>()].get<std::string>();
}

/// Bytes by name and category, those with the most bytes first; what follows `most` rows is one row.
class Sums {
 public:
  void add(const std::string& name, size_t category, int64_t bytes) {
    rows_[name][category] += bytes;
    ++counts_[name];
  }
  ordered_json rows(size_t most) const {
    std::vector<std::pair<std::string, Totals>> sorted(rows_.begin(), rows_.end());
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto& a, const auto& b) { return sum_of(a.second) > sum_of(b.second); });
    ordered_json rows = ordered_json::array();
    Totals rest{};
    int64_t in_rest = 0;
    for (size_t i = 0; i < sorted.size(); ++i) {
      if (i < most) {
        rows.push_back({sorted[i].first, counts_.at(sorted[i].first), sorted[i].second});
        continue;
      }
      in_rest += counts_.at(sorted[i].first);
      for (size_t c = 0; c < rest.size(); ++c) rest[c] += sorted[i].second[c];
    }
    if (in_rest > 0) rows.push_back({"all others", in_rest, rest});
    return rows;
  }

 private:
  std::map<std::string, Totals> rows_;
  std::map<std::string, int64_t> counts_;
};

/// Tables of what is alive at the peak.
ordered_json peak_for_page(const ordered_json& timeline) {
  constexpr size_t kMostRows = 40, kMostTensors = 25;
  Sums units, modules, operators;
  std::vector<size_t> alive = timeline.at("peak").at("alive");
  const ordered_json& blocks = timeline.at("blocks");
  for (const size_t i : alive) {
    const ordered_json& block = blocks[i];
    const auto category = block[kCategory].get<size_t>();
    const auto bytes = block[kBytes].get<int64_t>();
    if (block[kUnit].get<int>() >= 0) units.add(name_at(timeline, block[kUnit], ""), category, bytes);
    if (category != kActivations && category != kWorkspace) continue;
    modules.add(name_at(timeline, block[kModule], "no module, or before this step"), category, bytes);
    operators.add(name_at(timeline, block[kOperator], "no operator, or before this step"), category, bytes);
  }
  std::stable_sort(alive.begin(), alive.end(), [&](size_t a, size_t b) {
    return blocks[a][kBytes].get<int64_t>() > blocks[b][kBytes].get<int64_t>();
  });
  ordered_json largest = ordered_json::array();
  for (size_t i = 0; i < std::min(alive.size(), kMostTensors); ++i) {
    const ordered_json& block = blocks[alive[i]];
    largest.push_back({block[kBytes], block[kCategory], name_at(timeline, block[kUnit], ""),
                       name_at(timeline, block[kModule], ""), name_at(timeline, block[kOperator], "")});
  }
  ordered_json peak = timeline.at("peak");
  peak.erase("alive");
  peak["units"] = units.rows(kMostRows);
  peak["modules"] = modules.rows(kMostRows);
  peak["operators"] = operators.rows(kMostRows);
  peak["tensors"] = std::move(largest);
  return peak;
}

/// Of each of kMaxColumns intervals the moment with the largest total.
ordered_json columns_of(const ordered_json& timeline) {
  const int64_t length = std::max<int64_t>(1, timeline.at("nanoseconds"));
  std::vector<std::pair<int64_t, Totals>> columns;
  int64_t interval = -1;
  walk(timeline, events_of(timeline), [&](int64_t at, const Totals& totals) {
    const int64_t its = std::min(kMaxColumns - 1, at * kMaxColumns / length);
    if (its != interval) {
      columns.emplace_back(at, totals);
    } else if (sum_of(totals) > sum_of(columns.back().second)) {
      columns.back() = {at, totals};
    }
    interval = its;
  });
  ordered_json rows = ordered_json::array();
  for (const auto& [at, totals] : columns) {
    ordered_json row = {at};
    for (const int64_t bytes : totals) row.push_back(bytes);
    rows.push_back(std::move(row));
  }
  return rows;
}

/// The largest blocks, with the names that they have.
void add_blocks(const ordered_json& timeline, ordered_json& page) {
  std::vector<size_t> order(timeline.at("blocks").size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto bytes_of = [&](size_t i) { return timeline.at("blocks")[i][kBytes].get<int64_t>(); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return bytes_of(a) > bytes_of(b); });
  page["num_blocks"] = order.size();
  if (order.size() > kMaxBlocks) order.resize(kMaxBlocks);
  std::sort(order.begin(), order.end());
  std::map<int, int> places;
  page["names"] = ordered_json::array();
  page["blocks"] = ordered_json::array();
  for (const size_t i : order) {
    ordered_json block = timeline.at("blocks")[i];
    for (const size_t column : {kUnit, kModule, kOperator}) {
      const auto name = block[column].get<int>();
      if (name < 0) continue;
      const auto [entry, is_new] = places.try_emplace(name, static_cast<int>(places.size()));
      if (is_new) page["names"].push_back(timeline.at("names")[static_cast<size_t>(name)]);
      block[column] = entry->second;
    }
    page["blocks"].push_back(std::move(block));
  }
}

}  // namespace

const std::array<MemoryCategory, kNumMemoryCategories>& memory_categories() { return kCategories; }

size_t category_of(const MemoryBlock& block) {
  switch (block.use) {
    case MemoryUse::kParameters: return kParameters;
    case MemoryUse::kGradients: return kGradients;
    case MemoryUse::kMaster: return kMaster;
    case MemoryUse::kOptimizer: return kOptimizer;
    case MemoryUse::kSnapshot: return kSnapshot;
    case MemoryUse::kCommunication: return block.unit >= 0 ? kGathered : kCommunication;
    case MemoryUse::kDiskBuffers: return kDiskBuffers;
    case MemoryUse::kActivations: return block.in_call ? kWorkspace : kActivations;
    case MemoryUse::kOther: return kOther;
  }
  return kOther;
}

ordered_json timeline_json(const MemoryRecord& record, const Phases& phases) {
  ordered_json json = {{"unit", "bytes"}, {"nanoseconds", nanoseconds(record.seconds)}};
  json["phases"] = ordered_json::array();
  for (const auto& [phase, seconds] : phases) json["phases"].push_back({phase, nanoseconds(seconds)});
  for (const MemoryCategory& category : kCategories)
    json["categories"].push_back({{"key", category.key}, {"name", category.name}});
  json["names"] = record.names;
  json["blocks"] = ordered_json::array();
  for (const MemoryBlock& block : record.blocks)
    json["blocks"].push_back({nanoseconds(block.begin_s),
                              block.end_s < 0 ? ordered_json() : ordered_json(nanoseconds(block.end_s)),
                              block.bytes, category_of(block), block.unit, block.module, block.op});

  const std::vector<Event> events = events_of(json);
  int64_t peak_at = 0, most = -1;
  Totals at_peak{};
  walk(json, events, [&](int64_t at, const Totals& totals) {
    if (sum_of(totals) <= most) return;
    most = sum_of(totals);
    at_peak = totals;
    peak_at = at;
  });
  ordered_json& peak = json["peak"];
  peak = {{"nanoseconds", peak_at}, {"total", most}};
  for (size_t i = 0; i < kNumMemoryCategories; ++i) peak["by_category"][kCategories[i].key] = at_peak[i];
  peak["alive"] = ordered_json::array();
  for (size_t i = 0; i < json["blocks"].size(); ++i) {
    const ordered_json& block = json["blocks"][i];
    if (block[kBegin] <= peak_at && (block[kEnd].is_null() || block[kEnd] > peak_at))
      peak["alive"].push_back(i);
  }
  return json;
}

MemoryBytes peak_by_use(const ordered_json& timeline) {
  constexpr std::array<MemoryUse, kNumMemoryCategories> kUses = {
      MemoryUse::kParameters,  MemoryUse::kCommunication, MemoryUse::kGradients,     MemoryUse::kMaster,
      MemoryUse::kOptimizer,   MemoryUse::kSnapshot,      MemoryUse::kCommunication, MemoryUse::kDiskBuffers,
      MemoryUse::kActivations, MemoryUse::kActivations,   MemoryUse::kOther};
  MemoryBytes peak;
  for (size_t i = 0; i < kNumMemoryCategories; ++i)
    peak[kUses[i]] += timeline.at("peak").at("by_category").at(kCategories[i].key).get<int64_t>();
  return peak;
}

ordered_json timeline_for_page(const ordered_json& timeline) {
  ordered_json page;
  page["nanoseconds"] = timeline.at("nanoseconds");
  page["phases"] = timeline.at("phases");
  page["columns"] = columns_of(timeline);
  page["peak"] = peak_for_page(timeline);
  add_blocks(timeline, page);
  return page;
}

std::string memory_trace(const std::vector<std::pair<std::string, ordered_json>>& timelines) {
  ordered_json events = ordered_json::array();
  const auto us = [](int64_t ns) { return static_cast<double>(ns) / 1e3; };
  for (size_t process = 0; process < timelines.size(); ++process) {
    const auto& [name, timeline] = timelines[process];
    const auto add = [&](const char* type, const std::string& title, int64_t at, ordered_json more) {
      ordered_json event = {{"ph", type}, {"name", title}, {"pid", process}, {"tid", 0}, {"ts", us(at)}};
      event.update(more);
      events.push_back(std::move(event));
    };
    add("M", "process_name", 0, {{"args", {{"name", name}}}});
    add("M", "thread_name", 0, {{"args", {{"name", "phases"}}}});
    const ordered_json& phases = timeline.at("phases");
    for (size_t i = 0; i < phases.size(); ++i) {
      const int64_t begin = phases[i][1];
      const int64_t end =
          i + 1 < phases.size() ? phases[i + 1][1].get<int64_t>() : timeline.at("nanoseconds").get<int64_t>();
      add("X", phases[i][0], begin, {{"dur", us(end - begin)}});
    }
    walk(timeline, events_of(timeline), [&](int64_t at, const Totals& totals) {
      ordered_json bytes;
      for (size_t i = 0; i < kNumMemoryCategories; ++i) bytes[kCategories[i].name] = totals[i];
      add("C", "bytes", at, {{"args", bytes}});
    });
    const int64_t least = timeline.at("peak").at("total").get<int64_t>() / 1000;
    const ordered_json& blocks = timeline.at("blocks");
    for (size_t i = 0; i < blocks.size(); ++i) {
      const ordered_json& block = blocks[i];
      if (block[kBytes] < least) continue;
      const ordered_json id = {{"cat", kCategories[block[kCategory].get<size_t>()].name}, {"id", i}};
      ordered_json begin = id;
      begin["args"] = {{"bytes", block[kBytes]},
                       {"unit", name_at(timeline, block[kUnit], "")},
                       {"module", name_at(timeline, block[kModule], "")},
                       {"operator", name_at(timeline, block[kOperator], "")}};
      const std::string title = id["cat"];
      add("b", title, block[kBegin], begin);
      add("e", title, block[kEnd].is_null() ? timeline.at("nanoseconds") : block[kEnd], id);
    }
  }
  return json_text(ordered_json({{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}));
}

}  // namespace tessera::train

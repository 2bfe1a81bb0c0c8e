#include "train/memory_page.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/check.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "train/report/report.h"

namespace tessera::train {

extern const std::string_view kMemoryPage;  // memory_page.html, by cmake/EmbedText.cmake

namespace {

using nlohmann::ordered_json;

ordered_json run_json(const MeasuredRun& run) {
  ordered_json json = to_json(run.trial);
  json["label"] = run.label;
  json["policy"] = run.trial.activations;
  json.erase("phases");
  json.erase("timeline");
  if (!run.timeline.is_null()) json["timeline"] = timeline_for_page(run.timeline);
  return json;
}

std::string about(const MemoryPage& page) {
  const std::string model =
      str(format_count(page.model.num_trainable), page.model.num_frozen > 0 ? " trainable" : "",
          page.model.num_frozen > 0 ? str(" and ", format_count(page.model.num_frozen), " frozen") : "",
          " parameters, ", page.optimizer);
  if (page.runs.empty()) return str(model, ": by formula; nothing was measured.");
  const MemoryTrial& any = page.runs.front().trial;
  return str(model, ", ", any.precision, ", micro-batch ", any.micro_batch, ", recomputation ",
             any.activations, "; measured on ", counted(any.world_size, "rank"), " (", any.backend, ", ",
             any.device, ").",
             page.is_complete ? ""
                              : " Buffers and data that were there before the record are not counted: set "
                                "memory_breakdown to true to count them.");
}

}  // namespace

std::string memory_page_html(const MemoryPage& page) {
  int64_t largest = page.runs.empty() ? page.model.bytes_of({}, 1, zero::Tier::kDevice).total() : 0;
  for (const MeasuredRun& run : page.runs)
    largest = std::max({largest, run.trial.peak.total(), run.trial.process_peak});
  double limit_gb = 1;
  while (limit_gb * 1e9 < static_cast<double>(largest) && limit_gb < 64) limit_gb *= 2;
  if (page.limit) limit_gb = static_cast<double>(*page.limit) / 1e9;

  ordered_json data = {{"about", about(page)},
                       {"unit", largest >= 10'000'000'000                    ? "GB"
                                : largest >= 10'000'000 || page.runs.empty() ? "MB"
                                                                             : "kB"},
                       {"world_size", page.world_size},
                       {"stage", page.stage},
                       {"limit", limit_gb},
                       {"limit_is_given", page.limit.has_value()},
                       {"in_groups", page.in_groups},
                       {"precision_of_parameters", name_of(page.model.dtype)}};
  for (const MemoryCategory& category : memory_categories())
    data["categories"].push_back({{"key", category.key}, {"name", category.name}});
  data["runs"] = data["variants"] = ordered_json::array();
  for (const MeasuredRun& run : page.runs) data["runs"].push_back(run_json(run));
  for (const MeasuredRun& run : page.variants) data["variants"].push_back(run_json(run));
  data["formulas"] = state_formulas(page.model);

  std::string text;
  for (const char c : json_text(data))
    text += c == '<' ? std::string("\\u003c") : std::string(1, c);  // no tag ends there
  constexpr std::string_view kPlace = "@DATA@";
  const size_t place = kMemoryPage.find(kPlace);
  TESSERA_CHECK(place != std::string_view::npos);
  return std::string(kMemoryPage.substr(0, place)) + text +
         std::string(kMemoryPage.substr(place + kPlace.size()));
}

}  // namespace tessera::train

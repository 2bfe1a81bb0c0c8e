#include "engine/config/document/suggest.h"

#include <algorithm>

#include "core/ascii.h"
#include "core/str.h"

namespace tessera::config {
namespace {

constexpr size_t kLongestName = 64;  // of a key; a longer name is not a typing mistake

}  // namespace

int edit_distance(std::string_view first, std::string_view second) {
  std::string a = ascii_lower(first), b = ascii_lower(second);
  std::vector<std::vector<int>> d(a.size() + 1, std::vector<int>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = static_cast<int>(i);
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      int replace = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, replace});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
  if (name.empty() || name.size() > kLongestName) return "";
  std::string best;
  int best_distance = 1 << 20;
  for (const std::string& candidate : known) {
    int distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  int allowed = std::clamp(static_cast<int>(best.size()) / 3, 1, 4);
  if (best_distance <= allowed) return best;
  // "warmup_steps" for "warmup_num_steps" is near enough already; "micro_batch" for
  // "train_micro_batch_size_per_gpu" is a part of it.
  std::string part = ascii_lower(name);
  for (const std::string& candidate : known) {
    std::string whole = ascii_lower(candidate);
    if (part.size() >= 4 && whole.find(part) != std::string::npos) return candidate;
  }
  return "";
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& known) {
  std::string best = nearest_name(name, known);
  return best.empty() ? "" : str(" (did you mean \"", best, "\"?)");
}

std::string expected_names(std::string_view name, const std::vector<std::string>& known,
                           const std::string& all_are_in) {
  constexpr size_t kMostListed = 8, kNearest = 5;
  if (known.empty()) return "no keys here";
  if (known.size() <= kMostListed) return str("one of ", join(known, ", "));
  // A long name is not a typing mistake: the first names of the list are shown.
  const std::string_view compared = name.size() <= kLongestName ? name : "";
  std::vector<std::pair<double, std::string>> ranked;  // by the part that differs
  for (const std::string& candidate : known)
    ranked.emplace_back(compared.empty()
                            ? 0.0
                            : edit_distance(compared, candidate) /
                                  static_cast<double>(std::max(compared.size(), candidate.size())),
                        candidate);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> nearest;
  for (size_t i = 0; i < kNearest; ++i) nearest.push_back(ranked[i].second);
  return str("one of ", join(nearest, ", "), ", … (",
             all_are_in.empty() ? str(known.size() - kNearest, " more)")
                                : str("all ", known.size(), " are in ", all_are_in, ")"));
}

}  // namespace tessera::config

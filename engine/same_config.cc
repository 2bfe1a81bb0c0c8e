#include "engine/same_config.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/block_hashes.h"
#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMostKeys = 4;         // of an error
constexpr size_t kMostCharacters = 80;  // of a value

struct Difference {
  std::string key;
  const ordered_json* here;  // null: absent
  const ordered_json* there;
};

/// The keys, with dots, in which two objects differ.
void find_differences(const std::string& prefix, const ordered_json& here, const ordered_json& there,
                      std::vector<Difference>& found) {
  const auto compare = [&](const std::string& key, const ordered_json* a, const ordered_json* b) {
    if (a && b && a->is_object() && b->is_object()) return find_differences(str(key, "."), *a, *b, found);
    if (!a || !b || *a != *b) found.push_back({key, a, b});
  };
  for (const auto& [name, value] : here.items())
    compare(prefix + name, &value, there.contains(name) ? &there.at(name) : nullptr);
  for (const auto& [name, value] : there.items())
    if (!here.contains(name)) compare(prefix + name, nullptr, &value);
}

std::string describe(const ordered_json* value) {
  if (!value) return "absent";
  const std::string text = json_text(*value);
  return num_characters(text) <= kMostCharacters ? text : str(first_characters(text, kMostCharacters), "…");
}

}  // namespace

void check_same_config(comm::Communicator& comm, const ordered_json& mine) {
  if (comm.size() == 1) return;
  const std::string text = json_text(mine);
  if (comm::first_unlike(comm, "config digest", checkpoint::text_digest(text)) == 0) return;
  const std::vector<std::string> texts = comm.exchange(text, "config");
  const ordered_json first = parse_ordered_json(texts[0]);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const ordered_json other = parse_ordered_json(texts[rank]);
    std::vector<Difference> found;
    find_differences("", first, other, found);
    if (found.empty()) continue;
    std::vector<std::string> parts;
    for (const Difference& one : found) {
      if (parts.size() == kMostKeys) {
        parts.push_back(str("and ", found.size() - kMostKeys, " more"));
        break;
      }
      parts.push_back(str(one.key, " is ", describe(one.here), " on rank 0, but ", describe(one.there),
                          " on rank ", rank));
    }
    throw ConfigError(join(parts, "; "), "; expected the same on all ranks");
  }
}

}  // namespace tessera

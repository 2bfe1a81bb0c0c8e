#include "engine/same_config.h"

#include <bit>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "checkpoint/block_hashes.h"
#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "core/utf8.h"
#include "engine/optimizer/optimizer_setup.h"

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

template <class T>
uint64_t bits_of(T value) {
  return std::bit_cast<uint64_t>(static_cast<double>(value));
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

double digest_of(const std::vector<kernels::Hyper>& groups) {
  uint64_t hash = 14695981039346656037U;  // FNV-1a, a value at a time
  for (const kernels::Hyper& hyper : groups)
    visit_options(hyper, [&](const char*, const auto& value) {
      hash = (hash ^ bits_of(value)) * 1099511628211U;
      hash ^= hash >> 32;  // a double's difference may be in its last bits alone, or in its first
    });
  return static_cast<double>(hash >> 12);
}

std::string first_difference(comm::Communicator& comm, const std::vector<kernels::Hyper>& groups) {
  std::vector<const char*> names;  // of a group's options
  visit_options(groups.front(), [&](const char* name, const auto&) { names.push_back(name); });
  std::vector<uint64_t> mine;
  for (const kernels::Hyper& hyper : groups)
    visit_options(hyper, [&](const char*, const auto& value) { mine.push_back(bits_of(value)); });
  const std::vector<std::vector<uint64_t>> ranks = comm.exchange(mine, "options of the param groups");
  const auto shown = [](uint64_t bits) { return json_text(ordered_json(std::bit_cast<double>(bits))); };
  for (size_t rank = 1; rank < ranks.size(); ++rank)
    for (size_t at = 0; at < ranks[0].size() && at < ranks[rank].size(); ++at)
      if (ranks[rank][at] != ranks[0][at])
        return str("param group ", at / names.size(), " has ", names[at % names.size()], " ",
                   shown(ranks[0][at]), " on rank 0, but ", shown(ranks[rank][at]), " on rank ", rank);
  return "the param groups of the ranks differ";
}

}  // namespace tessera

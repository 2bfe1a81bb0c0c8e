#include "engine/optimizer/same_groups.h"

#include <bit>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/json/json_text.h"
#include "core/str.h"
#include "engine/optimizer/optimizer_setup.h"

namespace tessera {
namespace {

std::vector<std::pair<const char*, double>> values_of(const kernels::Hyper& hyper) {
  std::vector<std::pair<const char*, double>> values;
  visit_options(hyper, [&](const char* name, const auto& value) {
    values.emplace_back(name, static_cast<double>(value));
  });
  return values;
}

}  // namespace

double digest_of(const std::vector<kernels::Hyper>& groups) {
  uint64_t hash = 14695981039346656037U;  // FNV-1a, a value at a time
  for (const kernels::Hyper& hyper : groups)
    for (const auto& [name, value] : values_of(hyper)) {
      hash = (hash ^ std::bit_cast<uint64_t>(value)) * 1099511628211U;
      hash ^= hash >> 32;  // a double's difference may be in its last bits alone, or in its first
    }
  return static_cast<double>(hash >> 12);
}

std::string first_difference(comm::Communicator& comm, const std::vector<kernels::Hyper>& groups) {
  std::vector<uint64_t> mine;
  for (const kernels::Hyper& hyper : groups)
    for (const auto& [name, value] : values_of(hyper)) mine.push_back(std::bit_cast<uint64_t>(value));
  const std::vector<std::vector<uint64_t>> ranks = comm.exchange(mine, "options of the param groups");
  const size_t num_values = values_of(kernels::Hyper{}).size();
  for (size_t rank = 1; rank < ranks.size(); ++rank)
    for (size_t at = 0; at < ranks[0].size() && at < ranks[rank].size(); ++at)
      if (ranks[rank][at] != ranks[0][at])
        return str("param group ", at / num_values, " has ",
                   values_of(kernels::Hyper{})[at % num_values].first, " ",
                   json_text(nlohmann::json(std::bit_cast<double>(ranks[0][at]))), " on rank 0, but ",
                   json_text(nlohmann::json(std::bit_cast<double>(ranks[rank][at]))), " on rank ", rank);
  return "the param groups of the ranks differ";
}

}  // namespace tessera

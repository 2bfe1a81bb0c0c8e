#include "train/data/data_digest.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/block_hashes.h"
#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"

namespace tessera::train {
namespace {

using nlohmann::json;

constexpr int64_t kMaxSamples = 16;  // hashed of each set

std::string digest_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const at::Tensor bytes = tensor.contiguous();
  return tessera::str(
      at::toString(bytes.scalar_type()), " ", bytes.sizes(), " ",
      checkpoint::text_digest({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}));
}

SetDigest digest_set(std::string_view name, int64_t size,
                     const std::function<Batch(const std::vector<int64_t>&)>& make) {
  std::string text;
  const int64_t count = std::min(size, kMaxSamples);
  for (int64_t i = 0; i < count; ++i) {
    const Batch batch = make({i * size / count});
    for (const at::Tensor& input : batch.inputs) text += digest_of(input) + "\n";
    text += digest_of(batch.target) + "\n\n";
  }
  return {std::string(name), size, checkpoint::text_digest(text)};
}

DataDigest digest_sets(const Task& task) {
  const auto train = [&](const std::vector<int64_t>& indices) {
    return task.train_batch(indices, at::make_generator<at::CPUGeneratorImpl>(uint64_t{0}));
  };
  const auto eval = [&](const std::vector<int64_t>& indices) { return task.eval_batch(indices); };
  const auto test = [&](const std::vector<int64_t>& indices) { return task.test_batch(indices); };
  return {digest_set("training", task.train_size(), train), digest_set("evaluation", task.eval_size(), eval),
          digest_set("test", task.test_size(), test)};
}

}  // namespace

DataDigest check_same_data(const Task& task, comm::Communicator& comm) {
  DataDigest mine;
  comm::on_all_ranks<DataError>(comm, "data", [&] { mine = digest_sets(task); });
  std::vector<DataDigest> ranks;
  for (const std::string& sets : comm.exchange(json_text(to_json(mine)), "data"))
    ranks.push_back(digest_from_json(parse_json(sets)));
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    for (size_t set = 0; set < ranks[0].size(); ++set) {
      const SetDigest &first = ranks[0][set], &other = ranks[rank][set];
      if (first == other) continue;
      if (first.size != other.size)
        throw ConfigError("data: the ", first.name, " set has ", first.size, " samples on rank 0, but ",
                          other.size, " on rank ", rank, "; expected the same data on all ranks");
      throw ConfigError("data: the ", first.name, " set of rank ", rank,
                        " has other samples than rank 0's, or in another order, though as many (", first.size,
                        "); expected the same data on all ranks");
    }
  }
  return mine;
}

std::string describe_change(const DataDigest& before, const DataDigest& now) {
  std::vector<std::string> changes;
  for (const SetDigest& set : now) {
    const auto old = std::find_if(before.begin(), before.end(),
                                  [&](const SetDigest& other) { return other.name == set.name; });
    if (old == before.end() || *old == set) continue;
    changes.push_back(str("the ", set.name, " set has ",
                          old->size == set.size ? "other samples than before"
                                                : str(set.size, " samples, ", old->size, " before")));
  }
  return join(changes, "; ");
}

json to_json(const DataDigest& digest) {
  json sets = json::array();
  for (const SetDigest& set : digest) sets.push_back({set.name, set.size, set.digest});
  return sets;
}

DataDigest digest_from_json(const json& value) {
  DataDigest digest;
  for (const json& set : value) digest.push_back({set.at(0), set.at(1), set.at(2)});
  return digest;
}

}  // namespace tessera::train

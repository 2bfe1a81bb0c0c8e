#include "train/data_digest.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/block_hashes.h"
#include "comm/agreement.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::train {
namespace {

using nlohmann::json;

constexpr int64_t kMaxSamples = 16;  // of a set

std::string digest_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const at::Tensor bytes = tensor.contiguous();
  return tessera::str(at::toString(bytes.scalar_type()), " ", bytes.sizes(), " ",
             checkpoint::text_digest({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}));
}

/// [name, samples, digest]
json digest_set(std::string_view name, int64_t size, const std::function<Batch(const std::vector<int64_t>&)>& make) {
  std::string text;
  const int64_t count = std::min(size, kMaxSamples);
  for (int64_t i = 0; i < count; ++i) {
    const Batch batch = make({i * size / count});
    for (const at::Tensor& input : batch.inputs) text += digest_of(input) + "\n";
    text += digest_of(batch.target) + "\n\n";
  }
  return json::array({name, size, checkpoint::text_digest(text)});
}

/// Of each set.
json digest_sets(const Task& task) {
  const auto train = [&](const std::vector<int64_t>& indices) {
    return task.train_batch(indices, at::make_generator<at::CPUGeneratorImpl>(uint64_t{0}));
  };
  const auto eval = [&](const std::vector<int64_t>& indices) { return task.eval_batch(indices); };
  const auto test = [&](const std::vector<int64_t>& indices) { return task.test_batch(indices); };
  return json::array({digest_set("training", task.train_size(), train), digest_set("evaluation", task.eval_size(), eval),
                      digest_set("test", task.test_size(), test)});
}

}  // namespace

void check_same_data(const Task& task, comm::Communicator& comm) {
  if (comm.size() == 1) return;
  std::string mine;
  comm::on_all_ranks<DataError>(comm, "data", [&] { mine = digest_sets(task).dump(); });
  std::vector<json> ranks;
  for (const std::string& sets : comm.exchange(mine, "data")) ranks.push_back(json::parse(sets));
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    for (size_t set = 0; set < ranks[0].size(); ++set) {
      const json &first = ranks[0][set], &mine = ranks[rank][set];
      if (first == mine) continue;
      const std::string name = first[0];
      if (first[1] != mine[1])
        throw ConfigError(str("data: the ", name, " set has ", first[1], " samples on rank 0, but ", mine[1], " on rank ", rank,
                              "; expected the same data on all ranks"));
      throw ConfigError(str("data: the ", name, " set of rank ", rank, " has other samples than rank 0's, or in another order, though as many (", first[1],
                            "); expected the same data on all ranks"));
    }
  }
}

}  // namespace tessera::train

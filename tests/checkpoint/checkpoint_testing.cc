#include "tests/checkpoint/checkpoint_testing.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/hdf5/hdf5_image.h"
#include "checkpoint/read/reshard.h"
#include "checkpoint/sharded/checkpoint_files.h"
#include "core/str.h"

namespace tessera::checkpoint::testing {
namespace {

namespace fs = std::filesystem;

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t mix(uint64_t seed, const std::string& text) {
  for (unsigned char c : text) seed = mix(seed ^ c);
  return seed;
}

/// An all-gather of strings between threads. It waits for all ranks, without a time limit.
class Hub {
 public:
  explicit Hub(int world) : barrier_(world), slots_(world) {}
  std::vector<std::string> exchange(int rank, const std::string& mine) {
    slots_[rank] = mine;
    barrier_.arrive_and_wait();
    std::vector<std::string> all = slots_;
    barrier_.arrive_and_wait();
    return all;
  }

 private:
  std::barrier<> barrier_;
  std::vector<std::string> slots_;
};

}  // namespace

Bytes random_bytes(int64_t size, uint64_t seed) {
  Bytes bytes(static_cast<size_t>(size));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(mix(seed + i));
  return bytes;
}

MemoryFolder::MemoryFolder() {
  // In memory if possible: these tests kill processes, not machines, and thousands of syncs take minutes on a
  // busy disk.
  const fs::path memory = "/dev/shm";
  const fs::path parent = ::access(memory.c_str(), W_OK | X_OK) == 0 ? memory : fs::temp_directory_path();
  std::string name = (parent / "tessera-checkpoint-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
  path_ = name;
}

MemoryFolder::~MemoryFolder() {
  std::error_code error;
  fs::permissions(path_, fs::perms::owner_all, fs::perm_options::add, error);
  fs::remove_all(path_, error);
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

SampleModel::SampleModel(std::vector<zero::ParameterSpec> specs, const zero::LayoutOptions& options,
                         uint64_t seed, std::vector<std::string> state_names)
    : seed_(seed),
      layout_(std::move(specs), options),
      state_names_(std::move(state_names)),
      blobs_(options.world_size) {
  const SavedLayout saved = saved_layout(layout_);
  for (int unit = 0; unit < layout_.num_units(); ++unit) {
    weights_.push_back(fill(unit, "weights", saved.weights_type(unit)));
    states_.emplace_back();
    if (layout_.units()[unit].trainable)
      for (const std::string& name : state_names_)
        states_.back().push_back(fill(unit, name, DType::kFloat32));
  }
  for (int rank = 0; rank < layout_.world_size(); ++rank)
    blobs_[rank] = random_bytes(100 + rank, mix(seed, str("blob", rank)));
  make_tensors();
  state_ = {{"global_step", seed},
            {"scale", 65536.0},
            {"third", 1.0 / 3},
            {"client", {{"note", "für später"}, {"list", {1, nullptr, true}}}}};
}

Bytes SampleModel::fill(int unit, const std::string& dataset, DType type) const {
  const auto size = static_cast<size_t>(size_bytes(type));
  Bytes bytes(static_cast<size_t>(layout_.units()[unit].numel) * size);
  for (int index : layout_.units()[unit].parameters) {
    const uint64_t base = mix(mix(seed_, dataset), layout_.parameters()[index].name);
    for (int64_t i = 0; i < layout_.slice(index).numel; ++i) {
      const uint64_t value = mix(base + static_cast<uint64_t>(i));
      std::memcpy(bytes.data() + static_cast<size_t>(layout_.slice(index).offset + i) * size, &value, size);
    }
  }
  return bytes;
}

void SampleModel::make_tensors() {
  tensor_data_.reserve(kDTypes.size() + 2);  // spans refer to them
  const auto add = [&](const std::string& name, DType type, const std::vector<int64_t>& shape) {
    int64_t numel = 1;
    for (int64_t size : shape) numel *= size;
    Bytes& data = tensor_data_.emplace_back(random_bytes(numel * size_bytes(type), mix(seed_, name)));
    if (type == DType::kBool)
      for (std::byte& byte : data) byte &= std::byte{1};
    tensors_.push_back({.name = name, .type = type, .shape = shape, .data = data});
  };
  for (const auto& [type, type_name, bytes] : kDTypes)
    if (is_hdf5_type(type) && type != DType::kComplex128)  // those that every format has
      add(str("norm.", type_name), type, {3, 5});
  add("norm.num_batches_tracked", DType::kInt64, {});
  add("norm.empty", DType::kFloat32, {0, 4});
}

SaveRequest SampleModel::request(const fs::path& directory, const std::string& tag, int rank) const {
  SaveRequest request{.directory = directory,
                      .tag = tag,
                      .rank = rank,
                      .stage = 2,
                      .layout = &layout_,
                      .state_names = state_names_,
                      .units = {},
                      .tensors = {},
                      .blobs = {},
                      .state = nlohmann::json::object(),
                      .disk = {}};
  const auto slice = [&](const Bytes& whole) {
    const size_t bytes = whole.size() / layout_.world_size();
    return std::span(whole).subspan(rank * bytes, bytes);
  };
  for (int unit = 0; unit < layout_.num_units(); ++unit) {
    UnitData& data = request.units.emplace_back();
    data.weights = slice(weights_[unit]);
    for (const Bytes& state : states_[unit]) data.states.push_back(slice(state));
  }
  request.blobs.push_back({.name = "rng/cpu", .data = blobs_[rank]});
  if (rank == 0) {
    request.tensors = tensors_;
    request.state = state_;
  }
  return request;
}

std::vector<zero::Range> wanted_shards(const zero::Layout& layout, int rank) {
  std::vector<zero::Range> wanted;
  for (int unit = 0; unit < layout.num_units(); ++unit) wanted.push_back(layout.shard(unit, rank));
  return wanted;
}

std::vector<zero::Range> wanted_units(const zero::Layout& layout) {
  std::vector<zero::Range> wanted;
  for (const zero::UnitSpec& unit : layout.units()) wanted.push_back({0, unit.numel});
  return wanted;
}

std::string SampleModel::difference(const Checkpoint& checkpoint) const {
  const Manifest& manifest = checkpoint.manifest();
  const SavedLayout& saved = manifest.layout;
  const ElementSource& elements = checkpoint.elements();
  if (manifest.state != state_) return "state differs: " + manifest.state.dump();
  if (manifest.state_names != state_names_) return "state names differ";
  const Comparison comparison = compare(saved, layout_);
  if (!comparison.exact()) return comparison.describe();
  std::vector<Bytes> weights;
  std::vector<std::vector<Bytes>> states;
  for (int unit = 0; unit < layout_.num_units(); ++unit) {
    weights.emplace_back(weights_[unit].size());
    states.emplace_back();
    for (const Bytes& state : states_[unit]) states.back().emplace_back(state.size());
  }
  for (const Piece& piece : plan_reads(saved, layout_, comparison.matches, wanted_units(layout_))) {
    const auto read = [&](const TensorId& id, Bytes& into) {
      const int64_t size = size_bytes(elements.find(id)->type);
      elements.read(id, piece.first, std::span(into).subspan(piece.begin * size, piece.numel * size));
    };
    read(TensorId::weights(piece.parameter), weights[piece.unit]);
    for (size_t i = 0; i < states[piece.unit].size(); ++i)
      read(TensorId::state(piece.parameter, state_names_[i]), states[piece.unit][i]);
  }
  for (int unit = 0; unit < layout_.num_units(); ++unit) {
    if (weights[unit] != weights_[unit]) return "weights differ in " + layout_.describe(unit);
    if (states[unit] != states_[unit]) return "optimizer states differ in " + layout_.describe(unit);
  }
  if (manifest.tensors.size() != tensors_.size()) return "number of tensors differs";
  for (const WholeTensor& tensor : tensors_) {
    const TensorRecord* record = manifest.find_tensor(tensor.name);
    if (record == nullptr) return tensor.name + " is missing";
    const TensorId id = TensorId::buffer(static_cast<size_t>(record - manifest.tensors.data()));
    const StoredTensor stored = elements.find(id).value();
    if (stored.type != tensor.type || stored.shape != tensor.shape ||
        !std::ranges::equal(elements.read_all(id), tensor.data))
      return tensor.name + " differs";
  }
  for (int rank = 0; rank < manifest.world_size() && rank < layout_.world_size(); ++rank)
    if (elements.read_all(TensorId::blob(rank, "rng/cpu")) != blobs_[rank])
      return str("blob differs on rank ", rank);
  return "";
}

std::vector<zero::ParameterSpec> sample_specs() {
  const auto spec = [](const std::string& name, std::vector<int64_t> shape, DType dtype, bool trainable) {
    return zero::ParameterSpec{.name = name,
                               .shape = std::move(shape),
                               .dtype = dtype,
                               .trainable = trainable,
                               .group = 0,
                               .aliases = {}};
  };
  std::vector<zero::ParameterSpec> specs{spec("embedding.weight", {11, 7}, DType::kFloat32, true),
                                         spec("frozen.weight", {9, 5}, DType::kBFloat16, false),
                                         spec("fc.weight", {5, 4, 6}, DType::kFloat32, true),
                                         spec("fc.bias", {6}, DType::kFloat32, true),
                                         spec("half.weight", {40, 3}, DType::kBFloat16, true),
                                         spec("scale", {}, DType::kFloat32, true),
                                         spec("nothing", {0, 3}, DType::kFloat32, true),
                                         spec("frozen.table", {33}, DType::kFloat16, false),
                                         spec("odd/name", {3}, DType::kFloat32, true),
                                         spec("größe.weight", {130}, DType::kFloat32, true),
                                         spec("frozen.exact", {2, 3}, DType::kFloat64, false)};
  specs[0].aliases = {"head.weight"};
  specs[2].group = 1;
  return specs;
}

SampleModel sample_model(int world, uint64_t seed) {
  return {sample_specs(), {.world_size = world, .unit_numel = 200}, seed};
}

std::vector<std::string> run_ranks(int world,
                                   const std::function<void(int rank, const Exchange&)>& rank_main) {
  Hub hub(world);
  std::vector<std::string> errors(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] {
      try {
        rank_main(rank, [&, rank](const std::string& mine) { return hub.exchange(rank, mine); });
      } catch (const CheckpointError& error) {
        errors[rank] = error.what();
      } catch (const std::exception& error) {
        errors[rank] = str("not a CheckpointError: ", error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::vector<std::string> save_all(const SampleModel& model, const fs::path& directory, const std::string& tag,
                                  const std::function<DiskOptions(int rank)>& disk) {
  return run_ranks(model.layout().world_size(), [&](int rank, const Exchange& exchange) {
    SaveRequest request = model.request(directory, tag, rank);
    request.disk = disk ? disk(rank) : DiskOptions{.sync = false, .probe = {}};
    save(request, exchange);
  });
}

}  // namespace tessera::checkpoint::testing

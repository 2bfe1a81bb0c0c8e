// [Note: DeepSpeed's flat groups]
// At stages 1 and 2 the parameters of a param group lie one after the other, in the order of param_shapes, in
// a vector that is padded at its end (to a multiple of 2 * ranks), and since 0.19 behind parameters too
// (param_alignment_paddings). Rank r has its r-th of equal parts: fp32 masters without the padding at the end
// (single_partition_of_fp32_groups), and the optimizer's state with it, or without where the checkpoint is
// elastic. BF16_Optimizer, which does the same without a stage, leaves the padding in both.
//
// At stage 3 each parameter is divided: rank r has its r-th of parts of ceil(numel / ranks) elements, with
// padding where the parameter ends earlier. These lie one after the other in the rank's sub-groups
// (fp32_flat_groups), in the order of param_shapes. Masters and state have the same length.
//
// A file does not say of which rank it is: its name does. At stages 1 and 2 param_slice_mappings says which
// elements of the rank's part are which parameter's, and that is compared. At any stage two ranks never have
// the same masters to the bit, unless each parameter is one number: one file was copied over the other.
#include "checkpoint/foreign/deepspeed_optimizer.h"

#include <algorithm>
#include <set>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/pickle_json.h"
#include "checkpoint/foreign/saved_state.h"
#include "core/files/disk.h"
#include "core/numel.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Kind = PickleValue::Kind;

constexpr int64_t kShownBytes = 256;

/// Of the parameters that have elements in a rank's part: the first one's place there, and how many.
using Slices = std::map<std::string, std::pair<int64_t, int64_t>>;

/// The file of one rank.
struct RankState {
  fs::path path;
  int file = 0;
  int64_t stage = -1;  ///< -1: the file does not say
  std::vector<FlatPart> parts;
  std::vector<json> groups;
  std::vector<int> group_of_part;
  std::vector<int64_t> partitions;                  ///< by group, or one
  std::vector<std::vector<int64_t>> param_padding;  ///< by group and parameter; empty: none
  std::vector<Slices> slices;                       ///< by group; empty: the file does not say
  std::string begin_of_masters;
};

/// Elements [begin, begin + numel) of a rank's part, which are those of the parameter from `element` on.
struct Piece {
  size_t rank, part;
  int64_t begin, element, numel;
};

class RankReader {
 public:
  RankReader(const fs::path& path, int index, std::vector<LostValue>& lost, ForeignCheckpoint* counters)
      : file_(path), lost_(lost), counters_(counters) {
    out_.path = path;
    out_.file = index;
  }

  RankState read() {
    const PickleValue* state = file_.root().find("optimizer_state_dict");
    if (state == nullptr || state->kind != Kind::kDict)
      throw CheckpointError(
          out_.path, ": is ", file_.root().describe(),
          " without \"optimizer_state_dict\"; expected an optimizer's file of DeepSpeed's ZeRO");
    if (counters_ != nullptr) {
      read_loss_scaler(*counters_, file_, state->find("loss_scaler"));
      const PickleValue* version = file_.root().find("ds_version");
      if (version == nullptr) version = state->find("ds_version");
      if (version != nullptr && version->kind == Kind::kString && counters_->version.empty())
        counters_->version = version->text;
    }
    out_.stage = integer_of(state->find("zero_stage")).value_or(-1);
    if (out_.stage > 3 || state->find("ds_zero_partition_groups") != nullptr)
      throw CheckpointError(out_.path,
                            ": is of a run whose experts are partitioned among themselves (DeepSpeed "
                            "AutoEP), which is not read");
    const PickleValue* counts = state->find("partition_count");
    if (counts != nullptr && counts->kind == Kind::kList)
      for (const PickleValue* count : counts->items) out_.partitions.push_back(integer_of(count).value_or(0));
    else if (const auto count = integer_of(counts))
      out_.partitions.push_back(*count);
    if (out_.stage == 3)
      read_parts(*state, "fp32_flat_groups", "optimizer_state_dict");
    else
      read_parts(*state, "single_partition_of_fp32_groups", "base_optimizer_state");
    read_paddings(*state);
    read_slices(state->find("param_slice_mappings"));
    return std::move(out_);
  }

 private:
  void read_parts(const PickleValue& state, const char* weights_key, const char* optimizer_key) {
    const PickleValue* weights = state.find(weights_key);
    if (weights == nullptr && state.find("fp32_groups") != nullptr)
      throw CheckpointError(out_.path,
                            ": is an elastic checkpoint of stage 3 (fp32_groups), which DeepSpeed has given "
                            "up and which is not read");
    if (weights == nullptr || (weights->kind != Kind::kList && weights->kind != Kind::kTuple))
      throw CheckpointError(out_.path, ": has no list ", weights_key, ", the fp32 masters; expected one");
    for (const PickleValue* value : weights->items) {
      std::optional<TorchTensor> tensor = file_.tensor(*value);
      if (!tensor || !tensor->is_contiguous() || !is_floating(tensor->type))
        throw CheckpointError(out_.path, ": ", weights_key, " has ", value->describe(),
                              "; expected flat tensors of floating-point numbers");
      const int64_t shown = std::min<int64_t>(tensor->numel() * size_bytes(tensor->type), kShownBytes);
      out_.begin_of_masters += file_.read(tensor->offset, shown);
      out_.parts.push_back({.weights = std::move(*tensor), .states = {}, .steps = {}, .padding = 0});
    }
    const PickleValue* optimizer = state.find(optimizer_key);
    if (optimizer == nullptr || optimizer->kind == Kind::kNone) {
      lost_.push_back({LostValue::Kind::kState, "",
                       str("the optimizer's state: ", out_.path.filename(), " has no ", optimizer_key)});
      out_.group_of_part.assign(out_.parts.size(), 0);
      return;
    }
    FlatOptimizer read = read_flat_optimizer(file_, *optimizer, lost_);
    if (read.states.size() != out_.parts.size())
      throw CheckpointError(out_.path, ": has ", out_.parts.size(),
                            " flat groups of fp32 masters and the optimizer's state of ", read.states.size(),
                            "; expected as many");
    const auto all_steps = integer_of(state.find("base_optimizer_state_step"));
    for (size_t i = 0; i < out_.parts.size(); ++i) {
      out_.parts[i].states = std::move(read.states[i].tensors);
      out_.parts[i].steps = read.states[i].steps ? read.states[i].steps : all_steps;
      out_.group_of_part.push_back(read.states[i].group);
    }
    out_.groups = std::move(read.groups);
  }

  void read_paddings(const PickleValue& state) {
    const PickleValue* paddings = state.find("group_paddings");
    if (paddings != nullptr && paddings->items.size() == out_.parts.size() && out_.stage != 3)
      for (size_t i = 0; i < out_.parts.size(); ++i)
        out_.parts[i].padding = std::max<int64_t>(integer_of(paddings->items[i]).value_or(0), 0);
    const PickleValue* inner = state.find("param_alignment_paddings");
    if (inner == nullptr || inner->kind != Kind::kList) return;
    for (const PickleValue* group : inner->items) {
      out_.param_padding.emplace_back();
      for (const PickleValue* one : group->items) {
        const int64_t padding = integer_of(one).value_or(-1);
        if (padding < 0 || padding > (1 << 20))
          throw CheckpointError(out_.path, ": param_alignment_paddings has ", one->describe(),
                                "; expected counts of elements");
        out_.param_padding.back().push_back(padding);
      }
    }
  }

  /// Of each group {NAME: fragment_address(numel=…, start=…)}.
  void read_slices(const PickleValue* mappings) {
    if (mappings == nullptr || mappings->kind != Kind::kList || mappings->items.size() != out_.parts.size())
      return;
    for (const PickleValue* group : mappings->items) {
      Slices& slices = out_.slices.emplace_back();
      for (size_t i = 0; i + 1 < group->items.size(); i += 2) {
        const PickleValue &name = *group->items[i], &address = *group->items[i + 1];
        const auto start = integer_of(address.find("start")), numel = integer_of(address.find("numel"));
        if (name.kind != Kind::kString || !start || !numel) return out_.slices.clear();
        slices.emplace(name.text, std::pair(*start, *numel));
      }
    }
  }

  TorchFile file_;
  std::vector<LostValue>& lost_;
  ForeignCheckpoint* counters_;
  RankState out_;
};

/// Puts the ranks' parts together.
class ZeroAssembly {
 public:
  ZeroAssembly(ForeignCheckpoint& checkpoint, std::vector<RankState> ranks, const DeepSpeedModel& model)
      : checkpoint_(checkpoint), ranks_(std::move(ranks)), model_(model) {}

  void run() {
    const std::optional<std::vector<ShapesByName>> shapes = model_.param_shapes();
    if (!shapes)
      model_.fail("has no param_shapes, but there are files of ZeRO's optimizer; expected those of one run");
    check_ranks();
    if (first().stage == 3)
      place_divided(*shapes);
    else
      place_in_groups(*shapes);
    say_lost(checkpoint_, left_out_);
    check_copies();
  }

 private:
  const RankState& first() const { return ranks_.front(); }

  void check_ranks() const {
    for (const RankState& rank : ranks_) {
      if (rank.stage != first().stage)
        throw CheckpointError(rank.path, ": is of stage ", rank.stage, ", rank 0's of stage ", first().stage,
                              "; expected files of one checkpoint");
      if (rank.parts.size() != first().parts.size())
        throw CheckpointError(rank.path, ": has ", rank.parts.size(), " flat groups, rank 0's file ",
                              first().parts.size(), "; expected files of one checkpoint");
      for (size_t i = 0; i < rank.parts.size(); ++i) {
        const FlatPart &one = rank.parts[i], &other = first().parts[i];
        if (one.weights.type != other.weights.type)
          throw CheckpointError(rank.path, ": has ", name_of(one.weights.type), " masters, rank 0's file ",
                                name_of(other.weights.type), "; expected files of one checkpoint");
        if (one.steps && other.steps && *one.steps != *other.steps)
          throw CheckpointError(rank.path, ": its optimizer counts ", *one.steps, " updates, rank 0's ",
                                *other.steps, "; expected files of one checkpoint");
      }
    }
  }

  void add(const std::string& name, const std::vector<int64_t>& shape, int group,
           const std::vector<Piece>& pieces, size_t part) {
    ForeignParameter parameter;
    parameter.name = name;
    parameter.group = group;
    parameter.steps = first().parts[part].steps.value_or(0);
    parameter.weights = {.type = first().parts[part].weights.type, .shape = shape, .runs = {}};
    for (const Piece& piece : pieces) {
      const FlatPart& from = ranks_[piece.rank].parts[piece.part];
      parameter.weights.runs.push_back(run_of(piece, from.weights));
    }
    for (const Piece& piece : pieces)
      for (const auto& [state, tensor] : ranks_[piece.rank].parts[piece.part].states)
        if (!parameter.states.contains(state)) add_state(parameter, state, shape, pieces);
    checkpoint_.parameters.push_back(std::move(parameter));
  }

  void add_state(ForeignParameter& parameter, const std::string& state, const std::vector<int64_t>& shape,
                 const std::vector<Piece>& pieces) {
    ForeignTensor out{.type = DType::kFloat32, .shape = shape, .runs = {}};
    for (const Piece& piece : pieces) {
      const RankState& rank = ranks_[piece.rank];
      const FlatPart& from = rank.parts[piece.part];
      const auto found = from.states.find(state);
      if (found == from.states.end())
        throw CheckpointError(rank.path, ": has no ", quoted_name(state), " of flat group ", piece.part,
                              ", which other ranks have; expected files of one checkpoint");
      const TorchTensor& tensor = found->second;
      const int64_t numel = tensor.numel(), masters = from.weights.numel();
      if (tensor.shape.size() != 1 || numel < masters ||
          numel - masters > (masters == 0 ? numel : from.padding)) {
        left_out_.push_back({LostValue::Kind::kState, state,
                             str("the optimizer's state ", quoted_name(state), ": a tensor of ", numel,
                                 " elements for ", masters)});
        return;
      }
      if (!out.runs.empty() && out.type != tensor.type)
        throw CheckpointError(rank.path, ": ", quoted_name(state), " is of ", name_of(tensor.type),
                              ", of other ranks ", name_of(out.type), "; expected files of one checkpoint");
      out.type = tensor.type;
      out.runs.push_back(run_of(piece, tensor));
    }
    parameter.states.emplace(state, std::move(out));
  }

  Run run_of(const Piece& piece, const TorchTensor& tensor) const {
    return {ranks_[piece.rank].file, tensor.offset + piece.begin * size_bytes(tensor.type), piece.element,
            piece.numel};
  }

  void place_in_groups(const std::vector<ShapesByName>& shapes) {
    if (shapes.size() != first().parts.size())
      model_.fail("param_shapes has ", shapes.size(), " groups, the optimizer's files ", first().parts.size(),
                  "; expected files of one checkpoint");
    const auto world = static_cast<int64_t>(ranks_.size());
    for (size_t group = 0; group < shapes.size(); ++group) {
      int64_t part = 0, available = 0, offset = 0;
      for (const RankState& rank : ranks_) {
        part = std::max(part, rank.parts[group].weights.numel());
        available += rank.parts[group].weights.numel();
      }
      const std::vector<int64_t> paddings = padding_of(group, shapes[group].size());
      std::vector<Slices> expected(ranks_.size());
      size_t index = 0;
      for (const auto& [name, shape] : shapes[group]) {
        const int64_t numel = numel_of(shape);
        const std::vector<Piece> pieces = pieces_of(name, group, offset, numel, part);
        for (const Piece& piece : pieces) expected[piece.rank][name] = {piece.begin, piece.numel};
        add(name, shape, static_cast<int>(group), pieces, group);
        offset += numel + paddings[index++];
      }
      if (available - offset >= 2 * world || available < offset)
        model_.fail("param_shapes has ", offset, " elements in group ", group,
                    ", the optimizer's files have ", available, "; expected files of one checkpoint");
      check_slices(group, expected);
    }
  }

  /// Throws for a file that is not its rank's. Where there is padding behind parameters, the file counts
  /// without it.
  void check_slices(size_t group, const std::vector<Slices>& expected) const {
    Slices expected_anywhere;
    for (const Slices& slices : expected) expected_anywhere.insert(slices.begin(), slices.end());
    const auto places_of = [](const Slices& slices) {
      std::set<std::pair<int64_t, int64_t>> places;
      for (const auto& [name, place] : slices) places.insert(place);
      return places;
    };
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].slices.empty() || !first().param_padding.empty()) continue;
      const Slices& found = ranks_[rank].slices[group];
      if (found == expected[rank]) continue;
      // Where somebody has renamed the parameters of one of the files, the places are compared.
      const bool is_renamed =
          std::ranges::none_of(found, [&](const auto& one) { return expected_anywhere.contains(one.first); });
      if (is_renamed && places_of(found) == places_of(expected[rank])) continue;
      const auto other = std::ranges::find(expected, found);
      const auto describe = [](const Slices& slices) {
        if (slices.empty()) return std::string("no parameter");
        const auto first =
            std::ranges::min_element(slices, {}, [](const auto& one) { return one.second.first; });
        return str(slices.size(), " parameters, first ", first->second.second, " elements of ",
                   quoted_name(first->first));
      };
      throw CheckpointError(
          ranks_[rank].path, ": param_slice_mappings has ", describe(found), " in group ", group,
          "; expected ", describe(expected[rank]), ", as param_shapes says of rank ", rank,
          other == expected.end() ? ": it is the file of another run, or the parameters lie in another order"
                                  : str(": it is the file of rank ", other - expected.begin()),
          "; copy the checkpoint again");
    }
  }

  /// Throws for two ranks whose masters have the same bits, unless these are one number in each parameter, as
  /// norms and biases are before the first update.
  void check_copies() const {
    const ForeignFiles files(checkpoint_.files);
    std::map<std::string, std::vector<size_t>> alike;  // ranks, by the first elements
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (const size_t other : alike[ranks_[rank].begin_of_masters])
        if (same_masters(files, ranks_[other], ranks_[rank]) && !has_constants_alone(files, ranks_[rank]))
          throw CheckpointError(ranks_[rank].path, ": has the same fp32 masters as ",
                                ranks_[other].path.filename(), "; expected those of rank ", rank,
                                ": one file was copied over the other, copy the checkpoint again");
      alike[ranks_[rank].begin_of_masters].push_back(rank);
    }
  }

  static bool same_masters(const ForeignFiles& files, const RankState& a, const RankState& b) {
    for (size_t i = 0; i < a.parts.size(); ++i) {
      const TorchTensor &left = a.parts[i].weights, &right = b.parts[i].weights;
      if (left.shape != right.shape ||
          !have_same_bits(files, contiguous_tensor(a.file, left.offset, left.type, {left.numel()}),
                          contiguous_tensor(b.file, right.offset, right.type, {right.numel()}),
                          /*may_be_constant=*/true))
        return false;
    }
    return true;
  }

  /// Whether each parameter has one number in the rank's masters.
  bool has_constants_alone(const ForeignFiles& files, const RankState& rank) const {
    for (const ForeignParameter& parameter : checkpoint_.parameters)
      for (const Run& run : parameter.weights.runs) {
        if (run.file != rank.file) continue;
        const ForeignTensor piece =
            contiguous_tensor(rank.file, run.offset, parameter.weights.type, {run.numel});
        if (have_same_bits(files, piece, piece, /*may_be_constant=*/false)) return false;
      }
    return true;
  }

  std::vector<int64_t> padding_of(size_t group, size_t count) const {
    const auto& all = first().param_padding;
    if (all.empty()) return std::vector<int64_t>(count);
    if (group >= all.size() || all[group].size() != count)
      throw CheckpointError(first().path, ": param_alignment_paddings does not have those of the ", count,
                            " parameters of group ", group);
    return all[group];
  }

  /// Elements [offset, offset + numel) of a group's vector, of which each rank has `part`.
  std::vector<Piece> pieces_of(const std::string& name, size_t group, int64_t offset, int64_t numel,
                               int64_t part) const {
    std::vector<Piece> pieces;
    for (int64_t done = 0; done < numel;) {
      const int64_t at = offset + done, rank = part == 0 ? 0 : at / part, begin = part == 0 ? 0 : at % part;
      const int64_t has = rank < static_cast<int64_t>(ranks_.size())
                              ? ranks_[static_cast<size_t>(rank)].parts[group].weights.numel()
                              : 0;
      const int64_t count = std::min(has - begin, numel - done);
      if (count <= 0)
        model_.fail("parameter ", quoted_name(name), " of the ", numel,
                    " elements that param_shapes says is not there from element ", done,
                    " on: the part of rank ", rank, " ends at element ", has, " of group ", group,
                    "; expected files of one checkpoint");
      pieces.push_back({static_cast<size_t>(rank), group, begin, done, count});
      done += count;
    }
    return pieces;
  }

  void place_divided(const std::vector<ShapesByName>& shapes) {
    const auto world = static_cast<int64_t>(ranks_.size());
    std::vector<int64_t> ends;  // of the sub-groups, in a rank's vector
    for (const FlatPart& part : first().parts)
      ends.push_back((ends.empty() ? 0 : ends.back()) + part.weights.numel());
    const int64_t available = ends.empty() ? 0 : ends.back();
    for (const RankState& rank : ranks_)
      for (size_t i = 0; i < ends.size(); ++i)
        if (rank.parts[i].weights.numel() != first().parts[i].weights.numel())
          throw CheckpointError(rank.path, ": flat group ", i, " has ", rank.parts[i].weights.numel(),
                                " elements, rank 0's ", first().parts[i].weights.numel(),
                                "; expected files of one checkpoint");
    int64_t wanted = 0;
    for (const ShapesByName& group : shapes)
      for (const auto& [name, shape] : group) wanted += (numel_of(shape) + world - 1) / world;
    if (wanted != available) fail_sizes(wanted, available);
    int64_t offset = 0;
    for (const ShapesByName& group : shapes)
      for (const auto& [name, shape] : group) {
        if (ends.empty())
          throw CheckpointError(first().path, ": fp32_flat_groups has no groups; expected one that has ",
                                name, ", as param_shapes says");
        const int64_t numel = numel_of(shape), share = (numel + world - 1) / world;
        const size_t part = part_at(ends, offset);
        std::vector<Piece> pieces;
        for (int64_t rank = 0; rank < world; ++rank)
          add_pieces(pieces, static_cast<size_t>(rank), ends, offset, rank * share,
                     std::min(share, numel - rank * share));
        add(name, shape, first().group_of_part[part], pieces, part);
        offset += share;
      }
  }

  [[noreturn]] void fail_sizes(int64_t wanted, int64_t available) const {
    const fs::path swapped = first().path.parent_path() / "offloaded_tensors";
    const bool is_swapped = available < wanted && is_there(swapped);
    throw CheckpointError(
        first().path, ": has ", available, " elements of a rank's parameters; expected ", wanted,
        ", as param_shapes says",
        is_swapped ? ": the optimizer was offloaded to NVMe, whose files (offloaded_tensors) are not "
                     "read; save with the optimizer in memory, or on the CPU"
        : available < wanted ? ": parameters or the optimizer's state may have been on NVMe"
                             : ": ranks may have been grouped (MiCS), or files are of two checkpoints");
  }

  static size_t part_at(const std::vector<int64_t>& ends, int64_t offset) {
    const auto at = std::upper_bound(ends.begin(), ends.end(), offset);
    return std::min(static_cast<size_t>(at - ends.begin()), ends.empty() ? 0 : ends.size() - 1);
  }

  static void add_pieces(std::vector<Piece>& pieces, size_t rank, const std::vector<int64_t>& ends,
                         int64_t offset, int64_t element, int64_t numel) {
    for (int64_t done = 0; done < numel;) {
      const size_t part = part_at(ends, offset + done);
      const int64_t begin = offset + done - (part == 0 ? 0 : ends[part - 1]);
      const int64_t count = std::min(ends[part] - offset - done, numel - done);
      pieces.push_back({rank, part, begin, element + done, count});
      done += count;
    }
  }

  ForeignCheckpoint& checkpoint_;
  std::vector<RankState> ranks_;
  const DeepSpeedModel& model_;
  std::vector<LostValue> left_out_;
};

void read_flat_state(FlatState& out, const TorchFile& file, const PickleValue& state,
                     std::vector<LostValue>& lost) {
  const auto lose = [&](const std::string& name, const std::string& line) {
    lost.push_back({LostValue::Kind::kState, name, line});
  };
  if (state.kind != Kind::kDict) return lose("", str("the optimizer's state: ", state.describe()));
  for (size_t i = 0; i + 1 < state.items.size(); i += 2) {
    const PickleValue &key = *state.items[i], &value = *state.items[i + 1];
    if (key.kind == Kind::kString && key.text == "step") continue;
    const char* const unread = TorchFile::unread_tensor(value);
    const std::optional<TorchTensor> tensor = unread != nullptr ? std::nullopt : file.tensor(value);
    if (key.kind != Kind::kString || !is_utf8(key.text) || !tensor || tensor->shape.empty() ||
        !tensor->is_contiguous() || !is_floating(tensor->type))
      lose(std::string(key.text),
           str("the optimizer's state ", key.kind == Kind::kString ? quoted_name(key.text) : key.describe(),
               ": ",
               tensor   ? str("a tensor of ", name_of(tensor->type), " ", describe_shape(tensor->shape))
               : unread ? std::string(unread)
                        : value.describe()));
    else
      out.tensors.emplace(key.text, *tensor);
  }
  const PickleValue* const step = state.find("step");
  if (const auto steps = count_in(file, step))
    out.steps = steps;
  else if (step != nullptr)
    lose("step", str("the optimizer's state 'step': ", step->describe()));
}

}  // namespace

void say_lost(ForeignCheckpoint& checkpoint, const std::vector<LostValue>& lost) {
  std::set<std::string> seen;
  std::vector<std::string> lines;
  for (const LostValue& one : lost) {
    if (!seen.insert(one.line).second) continue;
    lines.push_back(one.line);
    checkpoint.lost.push_back(one);
  }
  say_not_read(checkpoint, "the optimizer's state", lines);
}

FlatOptimizer read_flat_optimizer(const TorchFile& file, const PickleValue& value,
                                  std::vector<LostValue>& lost) {
  FlatOptimizer out;
  const auto fail = [&](const auto&... what) {
    throw CheckpointError(file.path(), ": the optimizer's state: ", what...);
  };
  if (value.kind == Kind::kList) {
    for (size_t i = 0; i < value.items.size(); ++i) {
      out.groups.push_back(json::object());
      out.states.emplace_back().group = static_cast<int>(i);
      read_flat_state(out.states.back(), file, *value.items[i], lost);
    }
    lost.push_back({LostValue::Kind::kOption, "lr",
                    "the param groups' options: an elastic checkpoint does not have them"});
    return out;
  }
  const PickleValue *groups = value.find("param_groups"), *states = value.find("state");
  if (value.kind != Kind::kDict || groups == nullptr || groups->kind != Kind::kList || states == nullptr ||
      states->kind != Kind::kDict)
    fail("is ", value.describe(), "; expected what torch.optim's state_dict() gives");
  std::map<int64_t, size_t> places;
  for (const PickleValue* group : groups->items) {
    const PickleValue* members = group->find("params");
    if (members == nullptr || members->kind != Kind::kList)
      fail("a param group is ", group->describe(), "; expected one with a list \"params\"");
    out.groups.push_back(group_options(*group, file, kOptionOfGroups, lost));
    for (const PickleValue* member : members->items) {
      if (member->kind != Kind::kInt)
        fail("a parameter of a group is ", member->describe(), "; expected a number");
      if (!places.emplace(member->integer, out.states.size()).second)
        fail("parameter ", member->integer, " is in two groups");
      FlatState& state = out.states.emplace_back();
      state.group = static_cast<int>(out.groups.size()) - 1;
      state.steps = count_in(file, group->find("step"));
    }
  }
  for (size_t i = 0; i + 1 < states->items.size(); i += 2) {
    const PickleValue& key = *states->items[i];
    const auto place = key.kind == Kind::kInt ? places.find(key.integer) : places.end();
    if (place == places.end()) {
      lost.push_back({LostValue::Kind::kState, "",
                      str("the optimizer's state of ", key.describe(), ", which is in no group")});
      continue;
    }
    read_flat_state(out.states[place->second], file, *states->items[i + 1], lost);
  }
  return out;
}

void read_zero_optimizer(ForeignCheckpoint& checkpoint, const DeepSpeedFiles& files,
                         const DeepSpeedModel& model) {
  std::vector<RankState> ranks;
  for (size_t rank = 0; rank < files.optimizer.size(); ++rank) {
    std::vector<LostValue> lost;  // all ranks say the same
    const int index = file_index(checkpoint, files.optimizer[rank]);
    ranks.push_back(RankReader(files.optimizer[rank], index, lost, rank == 0 ? &checkpoint : nullptr).read());
    if (rank > 0) continue;
    say_lost(checkpoint, lost);
    const auto& counts = ranks[0].partitions;
    const int64_t world = counts.empty() ? static_cast<int64_t>(files.optimizer.size())
                                         : *std::max_element(counts.begin(), counts.end());
    if (!counts.empty() && *std::min_element(counts.begin(), counts.end()) != world)
      throw CheckpointError(ranks[0].path,
                            ": has groups that are divided among different numbers of ranks, as a mixture of "
                            "experts has, which is not read");
    if (world != static_cast<int64_t>(files.optimizer.size()))
      throw CheckpointError(files.folder, ": has the optimizer's files of ", files.optimizer.size(),
                            " ranks; expected ", world, ", as ", ranks[0].path.filename(), " says",
                            world > static_cast<int64_t>(files.optimizer.size())
                                ? str(": the file of rank ", files.optimizer.size(), " is missing")
                                : ": the others are of another run, remove them");
  }
  const bool is_divided = ranks[0].stage == 3;
  if (is_divided != files.model_by_rank)
    throw CheckpointError(files.folder, ": the optimizer's files are of stage ", ranks[0].stage,
                          ", the model's file is ", files.model[0].filename(), "; expected those of one run");
  if (is_divided && files.model.size() != files.optimizer.size())
    throw CheckpointError(files.folder, ": has the model's files of ", files.model.size(),
                          " ranks and the optimizer's of ", files.optimizer.size(),
                          "; expected those of all ranks");
  checkpoint.world_size = static_cast<int>(files.optimizer.size());
  checkpoint.groups = ranks[0].groups;
  if (ranks[0].stage >= 0) {
    checkpoint.stage = static_cast<int>(ranks[0].stage);
  } else {  // BF16_Optimizer: of stage 1, or of none
    const auto zero = model.config().find("zero_optimization");
    const json stage =
        zero != model.config().end() && zero->is_object() ? zero->value("stage", json()) : json();
    checkpoint.stage = stage.is_number_integer() ? stage.get<int>() : 0;
  }
  ZeroAssembly(checkpoint, std::move(ranks), model).run();
}

}  // namespace tessera::checkpoint

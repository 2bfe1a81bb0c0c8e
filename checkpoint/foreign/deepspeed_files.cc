// [Note: DeepSpeed's files]
// Of a run with ZeRO, a folder has (R: data-parallel rank, M: model-parallel rank):
//
//   mp_rank_MM_model_states.pt                          the module and counters; of stage 3
//   zero_pp_rank_R_mp_rank_MM_model_states.pt           one of each rank
//   [bf16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt    fp32 masters and the optimizer's state of each rank
//
// Without ZeRO the model's file has the optimizer's state too. layer_* are of pipeline parallelism, or, with
// "expert" in the name, of a mixture of experts; expp_rank_* of the latter.
#include "checkpoint/foreign/deepspeed_files.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "checkpoint/checkpoint_error.h"
#include "core/files/disk.h"
#include "core/files/input_file.h"
#include "core/parse_number.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxTagBytes = 4096;
constexpr int kMaxRanks = 1 << 20;
constexpr std::string_view kModel = "_model_states.pt", kOptimizer = "_optim_states.pt";

struct FileName {
  enum class Kind { kOther, kModel, kOptimizer, kExpert, kPipeline };
  Kind kind = Kind::kOther;
  int rank = -1;  ///< -1: the name has none
  int model_rank = 0;
};

/// Takes WORD and the number that follows it off the front of a text. -1: the text does not begin so.
int take_rank(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return -1;
  std::string_view rest = text.substr(word.size());
  const int number = take_number<int>(rest).value_or(-1);
  if (number < 0 || number > kMaxRanks) return -1;
  text = rest;
  return number;
}

FileName parse(std::string_view name) {
  using Kind = FileName::Kind;
  if (!name.ends_with(".pt")) return {};
  const bool states = name.ends_with("model_states.pt") || name.ends_with("optim_states.pt");
  if (states && (name.starts_with("expp_rank_") || name.starts_with("expert_")))
    return {.kind = Kind::kExpert};
  if (states && name.starts_with("layer_"))
    return {.kind = name.find("expert") == name.npos ? Kind::kPipeline : Kind::kExpert};
  FileName found;
  for (const std::string_view prefix : {"bf16_", "fp16_"})
    if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
  found.rank = take_rank(name, "zero_pp_rank_");
  found.model_rank = take_rank(name, found.rank < 0 ? "mp_rank_" : "_mp_rank_");
  if (found.model_rank < 0) return {};
  if (name == kModel)
    found.kind = Kind::kModel;
  else if (name == kOptimizer && found.rank >= 0)
    found.kind = Kind::kOptimizer;
  else if (name.starts_with("_") && name.ends_with(kModel))  // mp_rank_00_000: stages of a pipeline
    found.kind = Kind::kPipeline;
  return found;
}

bool has_files(const fs::path& folder) {
  return std::ranges::any_of(paths_in(folder), [](const fs::path& path) {
    return parse(path.filename().string()).kind != FileName::Kind::kOther;
  });
}

/// The files by rank, without a gap.
std::vector<fs::path> in_order(const std::map<int, fs::path>& by_rank, const fs::path& folder,
                               std::string_view what) {
  std::vector<fs::path> files;
  for (const auto& [rank, path] : by_rank) {
    const auto expected = static_cast<int>(files.size());
    if (rank != expected)
      throw CheckpointError(folder, ": the ", what, " file of rank ", expected, " is missing, rank ", rank,
                            " has one; expected those of all ranks");
    files.push_back(path);
  }
  return files;
}

}  // namespace

bool is_deepspeed_universal(const fs::path& folder) { return is_folder(folder / "zero"); }

std::optional<fs::path> deepspeed_folder(const fs::path& path, const std::string& tag,
                                         const std::string& latest) {
  const auto is_one = [](const fs::path& folder) {
    return has_files(folder) || is_deepspeed_universal(folder);
  };
  if (!tag.empty()) {
    const fs::path folder = path / tag;
    return is_one(folder) ? std::optional(folder) : std::nullopt;
  }
  if (is_file(path)) {
    const std::string name = path.filename().string();
    const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
    if (name == latest) return deepspeed_folder(parent, "", latest);
    return parse(name).kind != FileName::Kind::kOther ? std::optional(parent) : std::nullopt;
  }
  if (!is_folder(path)) return std::nullopt;
  if (is_one(path)) return path;
  if (!is_file(path / latest)) return std::nullopt;
  std::string named = InputFile(path / latest).read_all(kMaxTagBytes);
  while (!named.empty() && (named.back() == '\n' || named.back() == '\r' || named.back() == ' '))
    named.pop_back();
  const fs::path relative(named);
  const bool leaves =
      relative.is_absolute() || std::find(relative.begin(), relative.end(), "..") != relative.end();
  if (named.empty() || leaves || !is_utf8(named) || named.find('\0') != named.npos)
    throw CheckpointError(path / latest, ": names ", is_utf8(named) ? quoted_name(named) : "no text",
                          "; expected the name of a checkpoint's folder beside it");
  const fs::path folder = path / relative;
  if (is_one(folder)) return folder;
  if (!is_folder(folder))
    throw CheckpointError(path / latest, ": names ", quoted_name(named),
                          ", which is no folder; expected a checkpoint there, or give another one's tag");
  return std::nullopt;
}

DeepSpeedFiles list_deepspeed_files(const fs::path& folder, bool universal) {
  using Kind = FileName::Kind;
  std::map<int, fs::path> optimizer, model;
  std::optional<fs::path> whole;
  for (const fs::path& path : paths_in(folder)) {
    const FileName name = parse(path.filename().string());
    if (name.kind == Kind::kOther) continue;
    if (name.kind == Kind::kExpert)
      throw CheckpointError(path,
                            ": is of a mixture of experts (DeepSpeed MoE), which is not read; expected a "
                            "model without expert parallelism");
    if (name.kind == Kind::kPipeline && universal) continue;
    if (name.kind == Kind::kPipeline)
      throw CheckpointError(path,
                            ": is of pipeline parallelism, which is not read; expected data parallelism "
                            "alone, or what DeepSpeed's ds_to_universal.py makes of it");
    if (name.model_rank > 0) {
      if (universal) continue;
      throw CheckpointError(path, ": is of tensor parallelism (mp_rank ", name.model_rank,
                            "), which is not read; expected data parallelism alone, or what DeepSpeed's "
                            "ds_to_universal.py makes of it");
    }
    if (name.kind == Kind::kModel && name.rank < 0) {
      whole = path;
      continue;
    }
    auto& files = name.kind == Kind::kModel ? model : optimizer;
    if (const auto [other, is_new] = files.emplace(name.rank, path); !is_new)
      throw CheckpointError(folder, ": rank ", name.rank, " has two files, ", other->second.filename(),
                            " and ", path.filename(), "; expected those of one run: remove the other's");
  }
  if (whole && !model.empty() && !universal)  // a universal folder may have both, for either kind of stage
    throw CheckpointError(folder, ": has both ", whole->filename(), " and ", model.begin()->second.filename(),
                          ", which stage 3 writes; expected those of one run: remove the other's");
  DeepSpeedFiles files{
      .folder = folder, .optimizer = in_order(optimizer, folder, "optimizer's"), .model = {}};
  if (whole)
    files.model = {*whole};
  else
    files.model = in_order(model, folder, "model's");
  files.model_by_rank = !whole;
  if (files.model.empty())
    throw CheckpointError(folder,
                          ": has no model's file; expected mp_rank_00_model_states.pt, or "
                          "zero_pp_rank_0_mp_rank_00_model_states.pt of stage 3");
  return files;
}

}  // namespace tessera::checkpoint

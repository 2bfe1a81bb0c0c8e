#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>

#include "checkpoint/consolidate/convert_checkpoint.h"
#include "checkpoint/formats/model_writer.h"
#include "core/error.h"
#include "core/log.h"
#include "core/str.h"
#include "tools/commands.h"
#include "tools/common/checkpoint_pass.h"
#include "tools/common/command_line.h"
#include "train/run/run_path.h"

namespace tessera::tools {
namespace {

using checkpoint::ConvertTarget;

struct ConsolidateFlags {
  std::string directory;
  std::string output;
  std::string tag;
  std::string format;
  std::string dtype = "fp32";
  std::string max_shard_size;
};

ConvertTarget parse_format(const std::string& word) {
  const auto target = checkpoint::parse_convert_target(word);
  if (target && is_weights_alone(*target)) return *target;
  throw ConfigError("--format ", word.empty() ? "''" : word, ": expected safetensors, h5 or pt");
}

// Whether the name means a folder: it exists as one, ends in a slash, or has no extension.
bool names_a_folder(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error) || !path.has_filename() || !path.has_extension();
}

// Sets the format, and the size of shards if OUT is a folder.
void choose_output(const ConsolidateFlags& flags, checkpoint::ConvertOptions& options) {
  options.output = flags.output;
  const auto by_ending = checkpoint::model_format_of(options.output);
  if (!flags.max_shard_size.empty()) {
    options.max_shard_bytes = parse_size("--max-shard-size", flags.max_shard_size, /*bare_bytes=*/true);
    options.target = flags.format.empty() ? ConvertTarget::kSafetensors : parse_format(flags.format);
    if (options.target != ConvertTarget::kSafetensors)
      throw ConfigError("--max-shard-size with --format ", flags.format,
                        ": only safetensors can be cut into shards");
    std::error_code error;
    if (by_ending && !std::filesystem::is_directory(options.output, error))
      throw ConfigError(flags.output,
                        " is the name of a file; expected a folder for the shards of --max-shard-size");
  } else if (!flags.format.empty()) {
    options.target = parse_format(flags.format);
    if (options.target == ConvertTarget::kSafetensors && names_a_folder(options.output))
      options.max_shard_bytes = kDefaultShardBytes;
  } else if (by_ending) {
    options.target = checkpoint::parse_convert_target(name_of(*by_ending)).value();
  } else if (names_a_folder(options.output)) {
    options.max_shard_bytes = kDefaultShardBytes;
  } else {
    throw ConfigError(flags.output, ": no format has the ending ", options.output.extension(),
                      "; expected .safetensors, .h5, .pt or .bin, --format, or a folder (", flags.output,
                      "/)");
  }
}

// "33.7M", "1.2B": the usual way to write model sizes.
std::string format_short(double value) {
  const char* const suffixes[] = {"", "k", "M", "B", "T"};
  size_t suffix = 0;
  for (; value >= 999.5 && suffix < 4; ++suffix) value /= 1000;
  return printed(suffix == 0 ? "%.0f%s" : "%.3g%s", value, suffixes[suffix]);
}

void run(const ConsolidateFlags& flags) {
  if (flags.directory.empty()) throw ConfigError("DIR is empty; expected the folder of the checkpoints");
  if (flags.output.empty()) throw ConfigError("OUT is empty; expected the name of a file or folder");
  const DType dtype = parse_output_dtype(flags.dtype);
  checkpoint::ConvertOptions options{.target = ConvertTarget::kSafetensors, .dtype = dtype};
  const train::RunPath path = train::find_run(flags.directory, flags.tag);
  choose_output(flags, options);
  check_output("OUT", flags.output, "");

  const Logger log{LogOptions{}};
  const checkpoint::ConvertResult result = convert_with_bar("consolidate", path, options);
  std::cout << flags.output << ": " << result.num_names << " tensors, "
            << format_short(static_cast<double>(result.numel)) << " elements, " << name_of(dtype) << ", from "
            << result.checkpoint.string() << std::endl;
  print_notes(result);
  if (!result.extra_state.empty())
    log.warning(str(flags.output, ": holds tensors alone, and not ", join(result.extra_state, ", "),
                    ", which get_extra_state() gave: load the checkpoint itself for that"));
  warn_of_overflow(
      result, flags.output, dtype,
      dtype == DType::kFloat16 ? "; expected at most 65,504 (--dtype bf16 or fp32 hold more)" : "", log);
}

}  // namespace

void add_consolidate_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "consolidate", "Write a sharded checkpoint as one model, for other programs to load");
  const auto flags = std::make_shared<ConsolidateFlags>();
  command->add_option("DIR", flags->directory, "Folder of a run, of its checkpoints, or of one of them")
      ->required();
  command
      ->add_option("OUT", flags->output,
                   "File: NAME.safetensors, NAME.h5, NAME.pt or NAME.bin; or a folder, for safetensors in "
                   "shards and an index")
      ->required();
  command->add_option("-t,--tag", flags->tag, "The checkpoint (default: the one DIR/latest names)")
      ->type_name("TAG");
  command->add_option("--format", flags->format, "safetensors, h5 or pt (default: by OUT's ending)")
      ->type_name("FORMAT");
  command->add_option("--dtype", flags->dtype, "fp32, bf16 or fp16 (default: fp32, the master weights)")
      ->type_name("TYPE");
  command
      ->add_option("--max-shard-size,--max_shard_size", flags->max_shard_size,
                   str("Shards of at most this size, e.g. 500MB (default for a folder: 5GB)"))
      ->type_name("SIZE");
  command->footer("The program is also called zero_to_fp32: zero_to_fp32 DIR OUT");
  command->callback([flags] { run(*flags); });
}

}  // namespace tessera::tools

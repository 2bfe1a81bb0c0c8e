// What the commands share: help in 80 columns, options of several commands, and errors of a command line in
// one line.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace tessera::tools {

/// The names of an option that are shown, with their dashes: "-n", "--nproc". Spellings with underscores
/// (torchrun's) are accepted but not shown.
std::vector<std::string> shown_names(const CLI::Option& option);

/// CLI11's help, wrapped at 80 columns.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_description(const CLI::App* app) const override;
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

/// Adds --set KEY=VALUE (repeatable) to `command`. `overrides` must outlive the parse.
void add_overrides(CLI::App& command, std::vector<std::string>& overrides, const std::string& description);
/// Adds RUN, the folder of a run, of its checkpoints or of one of them, and --tag, a checkpoint in it,
/// to `command`. Both must outlive the parse (train/run/run_path.h reads them).
void add_run(CLI::App& command, std::string& folder, std::string& tag);

/// From now on an empty name of a file, host, checkpoint and the like is a mistake: it is most often a
/// variable of a script that is not set.
void refuse_empty_values(CLI::App& app);

/// The program's arguments, null-terminated. Where the program was started as zero_to_fp32,
/// `consolidate` is inserted: `zero_to_fp32 DIR OUT` is `tessera consolidate DIR OUT`.
std::vector<char*> with_command(int argc, char** argv);

/// Bytes. GB is decimal and GiB binary, as in transformers and DeepSpeed. `bare_bytes`: a number
/// without a unit is bytes; otherwise it is refused. Throws ConfigError that names `option`.
int64_t parse_size(const std::string& option, const std::string& text, bool bare_bytes);

/// --dtype of a model that is written: fp32, bf16 or fp16. Throws ConfigError.
DType parse_output_dtype(const std::string& word);

/// Throws ConfigError that names `option` if writing `output` would replace `input`, or a file of a
/// checkpoint or of a run that cannot be made again.
void check_output(const std::string& option, const std::string& output, const std::string& input);

/// Throws DiskError, as replace_file() would in the end, where `file` cannot be written.
void check_writable(const std::filesystem::path& file);

/// The message for a command line whose parse threw `error`: one line, with the command or option that
/// is closest to what was given, or with the --set for a key of that name.
std::string describe_mistake(const CLI::App& app, const CLI::ParseError& error, int argc,
                             const char* const* argv);

}  // namespace tessera::tools

// The face of the command line: help that fits a terminal of 80 columns, what several
// commands take, and mistakes told in one line.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::tools {

/// CLI11's help, with descriptions broken into lines of at most 80 columns. Of an option's names the
/// spellings with underscores (torchrun's) are understood but not shown.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_description(const CLI::App* app) const override;
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

/// Local. Adds --set KEY=VALUE (repeatable) to `command`. `overrides` must outlive the parse.
void add_overrides(CLI::App& command, std::vector<std::string>& overrides, const std::string& description);
/// Local. Adds RUN, the folder of a run, of its checkpoints or of one of them, and --tag, a checkpoint in it,
/// to `command`. Both must outlive the parse (train/run_path.h reads them).
void add_run(CLI::App& command, std::string& folder, std::string& tag);

/// Local. The program's arguments, null-terminated, with the command that another name of the program stands
/// for: `zero_to_fp32 DIR OUT` is `tessera consolidate DIR OUT`.
std::vector<char*> with_command(int argc, char** argv);

/// Local. Bytes, as transformers and DeepSpeed write sizes: GB is decimal, GiB binary. Throws ConfigError
/// naming `option`. `bare_bytes`: a number without a unit is bytes; else it is refused.
int64_t parse_size(const std::string& option, const std::string& text, bool bare_bytes);

/// Local. What is wrong with a command line, in one line that names the nearest command or option, or the
/// --set that gives the key of this name; `error` is what the parse of it has thrown.
std::string describe_mistake(const CLI::App& app, const CLI::ParseError& error, int argc,
                             const char* const* argv);

}  // namespace tessera::tools

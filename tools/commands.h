// The commands of `tessera` that have a file of this folder each. Each function adds one to `app`; parsing it
// does the work, and errors come out of the parse as tessera::Error. `exit_code` must outlive the parse;
// `args` is argv[1] and on, for the ranks that a command starts.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tessera::tools {

/// `tessera train CONFIG`: reads the configuration, then either starts ranks of itself or is one.
void add_train_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code);
/// `tessera eval RUN`: evaluates a trained model once more, on any number of ranks.
void add_eval_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code);
/// `tessera predict RUN --text TEXT`: prints what a trained model answers.
void add_predict_command(CLI::App& app);
/// `tessera inspect DIR`: what a checkpoint holds, and whether it is whole: the exit code is 1 for a damaged
/// one. Starts no ranks and needs no libtorch.
void add_inspect_command(CLI::App& app, int& exit_code);
/// `tessera consolidate DIR OUT`, also called zero_to_fp32 (DeepSpeed's name): a sharded checkpoint as one
/// model.
void add_consolidate_command(CLI::App& app);
/// `tessera convert SRC DST --to FORMAT`: a checkpoint as DeepSpeed or FSDP2 would have written it.
void add_convert_command(CLI::App& app);
/// `tessera completion bash|zsh|man`: prints a completion for the shell, or the manual page, made of what
/// --help prints. `app` must outlive the parse, and have all commands when it is parsed.
void add_completion_command(CLI::App& app);

}  // namespace tessera::tools

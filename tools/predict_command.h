// `tessera predict RUN --text TEXT`: what a trained model answers.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera::tools {

/// Adds `predict` to `app`. Parsing it prints an answer for each text to stdout; errors
/// come out of the parse as tessera::Error.
void add_predict_command(CLI::App& app);

}  // namespace tessera::tools

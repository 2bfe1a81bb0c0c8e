// Checks how deep the pickles and the code of a TorchScript file are nested, before libtorch reads them.
//
// libtorch parses types and code, and destroys values, by functions that call themselves once a level. A file
// that is nested a million deep, which takes two megabytes, would overflow the stack, and there is no error
// to catch. torch.jit.save writes files of some ten levels. So both are read here first, without recursion: a
// pickle by following what its instructions put into what, code by its brackets, operators and blocks.
#pragma once

#include <string>
#include <string_view>

namespace tessera::examples {

/// Levels of values in values, of types in types, and of expressions in expressions.
inline constexpr int kMaxScriptNesting = 1000;

/// `name`: what a message calls it. Throws DataError for a pickle that is nested deeper than
/// kMaxScriptNesting, has values that contain themselves, or instructions that torch.jit.save does not write.
void check_pickle(std::string_view pickle, const std::string& name);

/// Throws DataError for code whose expressions are nested deeper than kMaxScriptNesting, or blocks
/// deeper than 250.
void check_code(std::string_view code, const std::string& name);

}  // namespace tessera::examples

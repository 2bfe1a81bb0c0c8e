// Arguments of Hugging Face's TrainingArguments and of Accelerate that a configuration does not accept, with
// what replaces them. Those that are another name of one key are declared with it (argument()).
#pragma once

#include <string_view>

namespace tessera::config {

/// What replaces an argument that a configuration does not accept, for an error: "here it is --resume
/// on the command line". "" for other names.
std::string_view instead_of_argument(std::string_view name);
/// What replaces a section that only `tessera train` has, for an error. "" for other names.
std::string_view instead_of_section(std::string_view name);

}  // namespace tessera::config

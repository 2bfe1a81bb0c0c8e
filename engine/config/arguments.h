// Arguments of Hugging Face's TrainingArguments and of Accelerate in a configuration, at its top or in
// `trainer`. Those that are an alias of one key are declared with it (argument()). Here are the others: those
// that set several keys or have other values, and those that a configuration does not accept.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/config/document/document.h"
#include "engine/config/key.h"

namespace tessera::config {

struct ConfigReport;

/// Replaces these arguments by the keys that they set: `"lr_scheduler_type": "cosine"` becomes a
/// scheduler. Arguments whose keys `table` does not have stay as they are. Aliases must be resolved already
/// (normalise()).
void expand_arguments(Document& document, const KeyTable& table, Problems& problems, ConfigReport* report);

/// An argument of expand_arguments(), for docs and the schema.
struct ArgumentRow {
  std::string name;
  std::string accepted;
  std::string keys;  ///< in words
};
std::vector<ArgumentRow> argument_rows();

/// What replaces an argument that a configuration does not accept, for an error: "here it is --resume
/// on the command line". "" for other names.
std::string_view instead_of_argument(std::string_view name);
/// What replaces a section that only `tessera train` has, for an error. "" for other names.
std::string_view instead_of_section(std::string_view name);

}  // namespace tessera::config

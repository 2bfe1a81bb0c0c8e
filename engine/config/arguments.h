// Arguments of Hugging Face's TrainingArguments and of Accelerate in a configuration, at its top or in
// `trainer`. Those that are another name of one key are declared with it (Key::also_argument); here are the
// others: those that stand for several keys or have other values, and those that are said in another place.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/config/document.h"
#include "engine/config/key.h"

namespace tessera::config {

struct Report;

/// Local. Puts the keys that these arguments stand for in their place: `"lr_scheduler_type": "cosine"`
/// becomes a scheduler. Those whose keys `table` does not have stay as they are. Names that are one key's
/// must be its own already (normalise()).
void expand_arguments(Document& document, const KeyTable& table, Problems& problems, Report* report);

/// What an argument that expand_arguments() knows stands for, for docs and the schema.
struct ArgumentRow {
  std::string name;
  std::string accepted;
  std::string keys;  ///< in words
};
std::vector<ArgumentRow> argument_rows();

/// Local. Where the argument of this name is said here, for an error: "here it is --resume on the command
/// line". "" for names that are none, and for those that a configuration takes.
std::string_view place_of_argument(std::string_view name);

}  // namespace tessera::config

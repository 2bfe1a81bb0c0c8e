// Checking a Document against the key tables: unknown keys, wrong types, values out of range, keys with no
// effect, and keys that are refused.
#pragma once

#include <string>
#include <vector>

#include "engine/config/document.h"
#include "engine/config/key.h"

namespace tessera::config {

/// What a reader of the configuration ought to be told, beside errors. One line each.
struct Report {
  std::vector<std::string> warnings;
  std::vector<std::string> resolved;  ///< `optimizer.params.lr: "auto" is 5e-05`
};

/// Local. Brings a document into one form: other names of a key become the name itself, words their canonical
/// spelling. A key that stands there under two names is a problem, unless its own name says "auto", which the
/// other name's value takes the place of.
void normalise(Document& document, const KeyTable& table, Problems& problems);

/// Local. Overrides (PATH=VALUE) whose path is another name of a key, under the name
/// itself: the document may have either.
std::vector<std::string> under_own_names(std::vector<std::string> overrides, const KeyTable& table);

/// Local. Checks every key: one that is unknown, has the wrong type or range, or is refused is a problem.
/// Adds one warning that lists the keys without effect. The document must be normalised.
void check(const Document& document, const KeyTable& table, Problems& problems, Report* report);

}  // namespace tessera::config

// Checking a Document against the key tables (unknown keys, wrong types, values out of range, keys with no
// effect, and keys that are refused), and reading it into structs.
#pragma once

#include <string>
#include <vector>

#include "engine/config/document.h"
#include "engine/config/key.h"

namespace tessera::config {

/// What reading a configuration has to say besides errors. One line each.
struct ConfigReport {
  std::vector<std::string> warnings;
  std::vector<std::string> resolved;  ///< `optimizer.params.lr: "auto" is 5e-05`
};

/// Local. Brings a document into one form: aliases of a key become its path, choices their canonical
/// spelling. A key that is given under two names is a problem, unless the value under its own name is "auto",
/// which the other one replaces.
void normalise(Document& document, const KeyTable& table, Problems& problems);

/// Local. Overrides (PATH=VALUE) whose path is an alias of a key, with the key's path in its place.
std::vector<std::string> without_aliases(std::vector<std::string> overrides, const KeyTable& table);

/// Local. Checks every key: one that is unknown, has the wrong type or range, or is refused is a problem.
/// Adds one warning that lists the keys without effect. The document must be normalised.
void check(const Document& document, const KeyTable& table, Problems& problems, ConfigReport* report);

/// Local. A checked document's values into fields of a struct with its defaults; "auto" becomes what the key
/// says, which is reported.
void read_fields(const std::vector<Field>& fields, const Document& document, ConfigReport* report);
/// Local. One of them, whose value stands at `path`.
void read_field(const Field& field, const nlohmann::json& value, const std::string& path,
                ConfigReport* report);
/// Local. Every field at its path.
void write_fields(const std::vector<Field>& fields, nlohmann::ordered_json& out);

}  // namespace tessera::config

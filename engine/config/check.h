// Checking a Document against the key tables (unknown keys, wrong types, values out of range, keys with no
// effect, and keys that are refused), and reading it into structs.
#pragma once

#include <string>
#include <vector>

#include "engine/config/document/document.h"
#include "engine/config/key.h"

namespace tessera::config {

/// Messages of reading a configuration other than errors. One line each.
struct ConfigReport {
  std::vector<std::string> warnings;
  std::vector<std::string> resolved;  ///< `optimizer.params.lr: "auto" is 5e-05`
  std::vector<std::string>
      given;  ///< keys at the top, by their own names, in the file or on the command line
};

/// Replaces aliases by the keys' paths, and choices by their canonical spelling. A key given under two
/// names is a problem, unless the value under its path is "auto", which is replaced.
void normalise(Document& document, const KeyTable& table, Problems& problems);

/// Overrides (PATH=VALUE) whose path is an alias of a key, with the key's path in its place.
std::vector<std::string> without_aliases(std::vector<std::string> overrides, const KeyTable& table);

/// Checks every key: one that is unknown, has the wrong type or range, or is refused is a problem.
/// Adds one warning that lists the keys without effect. The document must be normalised.
void check(const Document& document, const KeyTable& table, Problems& problems, ConfigReport* report);

/// Assigns a checked document's values to the fields of a struct that has its defaults. "auto" is
/// replaced by its meaning, and reported.
void read_fields(const std::vector<Field>& fields, const Document& document, ConfigReport* report);
/// The same for one field. `path`: of the value.
void read_field(const Field& field, const nlohmann::json& value, const std::string& path,
                ConfigReport* report);
/// Writes every field at its path.
void write_fields(const std::vector<Field>& fields, nlohmann::ordered_json& out);

/// Checks the value of a struct's field as if it stood in a document at `path`, and gives it its
/// canonical spelling. `type`: of the options that the field belongs to, if it does.
void check_field(const Field& field, const std::string& path, Origins& origins, Problems& problems,
                 const std::string& type = "");

/// What an error says of a key that is none of `known`: `unknown key (did you mean "lr"?), found 1 (a
/// number); expected one of lr, betas`.
std::string unknown_key(const std::string& name, const nlohmann::json& value,
                        const std::vector<std::string>& known);

}  // namespace tessera::config

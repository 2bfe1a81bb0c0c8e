// Generates the JSON Schema (configs/schema.json, for editors) and the rows of docs/configuration.md from the
// key table, to be compared with both files.
#pragma once

#include <string>

#include "engine/config/key.h"

namespace tessera::config {

/// A JSON Schema (draft 7) of the table, as indented text. Looser than the reader where JSON Schema
/// would grow long: choices in any case, which keys belong to which type, rules over several keys.
std::string schema_text(const KeyTable& table);

/// The line of docs/configuration.md about a key: name, what is accepted, default (of
/// keys that are used), meaning or reason.
std::string doc_row(const Key& key);

}  // namespace tessera::config

// Expands data.path: one or several files, or patterns.
#pragma once

#include <string>
#include <vector>

namespace tessera::examples {

/// Each entry is the name of a file or a pattern of glob(7) (`*`, `?`, `[0-9]`), whose matches come
/// in the order of their names' bytes; the name of a file that is there is no pattern. Entries keep their
/// order, so the result is the same on every machine with these files. Throws DataError: a pattern that
/// nothing matches, or a file named twice.
std::vector<std::string> find_data_files(const std::vector<std::string>& names);

}  // namespace tessera::examples

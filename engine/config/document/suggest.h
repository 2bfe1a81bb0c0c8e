// "Did you mean": the known name nearest to a mistyped one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::config {

/// Damerau-Levenshtein distance (optimal string alignment): insertions, deletions, substitutions
/// and swaps of neighbours, case ignored.
int edit_distance(std::string_view a, std::string_view b);

/// The nearest name if it is near enough to be a typing mistake (a third of its length, at least 1,
/// at most 4 edits), or if it contains the mistyped one; else "".
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

/// ` (did you mean "stage"?)`, or "".
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

/// "one of a, b": all that are known, or, where they are many, the few nearest to `name`,
/// and where the rest is: "one of a, b, c, d, … (all 24 are in docs/configuration.md)".
/// `all_are_in`: empty where no page has them.
std::string expected_names(std::string_view name, const std::vector<std::string>& known,
                           const std::string& all_are_in);

}  // namespace tessera::config

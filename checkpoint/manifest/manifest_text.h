// The begin and the end of a manifest's text, the same in all format versions: format name and version, and
// the digest.
#pragma once

#include <string>
#include <string_view>

namespace tessera::checkpoint {

inline constexpr std::string_view kFormatName = "tessera-checkpoint";
/// The last member of a file's record.
inline constexpr std::string_view kDatasetsKey = ", \"datasets\": ";
inline constexpr std::string_view kDigestKey =
    "\"digest\": \"";  // the digest's 32 digits follow: of all bytes up to here
inline constexpr std::string_view kDigestEnd = "\"\n}\n";

/// Appends the digest. `text` is everything before it, including the comma.
std::string seal_manifest(std::string text);

}  // namespace tessera::checkpoint

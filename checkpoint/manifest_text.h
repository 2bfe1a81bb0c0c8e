// The frame of a manifest's text, which all format versions share: what it
// begins with, and its digest at the end.
#pragma once

#include <string>
#include <string_view>

namespace tessera::checkpoint {

inline constexpr std::string_view kFormatName = "tessera-checkpoint";
inline constexpr std::string_view kDigestKey =
    "\"digest\": \"";  // the digest's 32 digits follow: of all bytes up to here
inline constexpr std::string_view kDigestEnd = "\"\n}\n";

/// Local. Ends a manifest: `text` is everything before the digest, the comma included.
std::string seal_manifest(std::string text);

}  // namespace tessera::checkpoint

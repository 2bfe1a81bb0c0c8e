// libFuzzer's entry: bytes between a manifest's frame go to the parser, which
// must refuse or accept them, never crash.
#include <cstddef>
#include <cstdint>
#include <string>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/sharded/manifest.h"
#include "core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tessera::checkpoint::Manifest;
  std::string text(reinterpret_cast<const char*>(data), size);
  // A digest of the input's own, so that the parser behind the digest is reached.
  if (const size_t digest = text.rfind(tessera::checkpoint::kDigestKey); digest != std::string::npos)
    text.resize(digest);
  try {
    const Manifest manifest = Manifest::parse(tessera::checkpoint::seal_manifest(text), "fuzz");
    if (Manifest::parse(manifest.to_text(), "fuzz") != manifest) __builtin_trap();
  } catch (const tessera::CheckpointError&) {
  }
  return 0;
}

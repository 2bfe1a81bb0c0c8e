#include "checkpoint/formats/safetensors_digest.h"

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "core/check.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

constexpr const char* kBlocksKey = "tessera_blocks";
constexpr const char* kDigestKey = "tessera_digest";
constexpr size_t kDigestDigits = 32;

int64_t blocks_of(const SafetensorsHeader& header) {
  int64_t sum = 0;
  for (const SafetensorsTensor& tensor : header.tensors) sum += num_blocks(tensor.bytes);
  return sum;
}

/// Offset in the head of the value of one of our metadata entries.
size_t place_of(std::string_view head, const char* key) {
  const std::string start = str("\"", key, "\":\"");
  const size_t found = head.find(start);
  return found == head.npos ? found : found + start.size();
}

/// The digest of a head, whatever its digest's digits are.
std::string digest_of(std::string head, size_t place) {
  head.replace(place, kDigestDigits, kDigestDigits, '0');
  return text_digest(head);
}

}  // namespace

void reserve_digest(SafetensorsHeader& header) {
  header.metadata[kBlocksKey] = std::string(static_cast<size_t>(blocks_of(header)) * 16, '0');
  header.metadata[kDigestKey] = std::string(kDigestDigits, '0');
}

void fill_digest(std::string& head, const std::vector<uint64_t>& block_hashes) {
  const std::string blocks = hashes_to_hex(block_hashes);
  const size_t blocks_at = place_of(head, kBlocksKey), digest_at = place_of(head, kDigestKey);
  TESSERA_CHECK(digest_at < head.size() && blocks_at < digest_at &&
                head.at(blocks_at + blocks.size()) == '"');
  head.replace(blocks_at, blocks.size(), blocks);
  head.replace(digest_at, kDigestDigits, digest_of(head, digest_at));
}

std::optional<SafetensorsHashes> SafetensorsHashes::read(std::string_view head,
                                                         const SafetensorsHeader& header,
                                                         const std::string& file) {
  const auto blocks = header.metadata.find(kBlocksKey), digest = header.metadata.find(kDigestKey);
  if (blocks == header.metadata.end() && digest == header.metadata.end()) return std::nullopt;
  const auto damaged = [&](const std::string& what) -> CheckpointError {
    return CheckpointError(file, ": the header is damaged: ", what,
                           ". If another program changed the file and kept Tessera's metadata, "
                           "write it without ",
                           kBlocksKey, " and ", kDigestKey);
  };
  if (blocks == header.metadata.end() || digest == header.metadata.end())
    throw damaged(str("it has no ", digest == header.metadata.end() ? kDigestKey : kBlocksKey,
                      " beside the other of the two"));
  const size_t place = place_of(head, kDigestKey);
  const bool is_ours = place < head.size() && head.substr(place).starts_with(digest->second) &&
                       digest->second.size() == kDigestDigits;
  const std::string found = is_ours ? digest_of(std::string(head), place) : "another form of header";
  if (found != digest->second)
    throw damaged(str("found ", found, "; expected the digest ", quoted_name(digest->second)));

  SafetensorsHashes hashes;
  std::optional<std::vector<uint64_t>> values = hashes_from_hex(blocks->second);
  if (!values || static_cast<int64_t>(values->size()) != blocks_of(header))
    throw damaged(str(kBlocksKey, " has ", blocks->second.size(),
                      " characters; expected 16 hexadecimal digits for each of ", blocks_of(header),
                      " blocks"));
  hashes.hashes_ = std::move(*values);
  int64_t next = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    hashes.first_block_.push_back(next);
    next += num_blocks(tensor.bytes);
  }
  return hashes;
}

}  // namespace tessera::checkpoint

#include "checkpoint/formats/safetensors.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "core/check.h"
#include "core/json/json_reader.h"
#include "core/numel.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {

void place_tensors(std::vector<SafetensorsTensor>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    const size_t rank_a = safetensors_rank(a.type), rank_b = safetensors_rank(b.type);
    return rank_a != rank_b ? rank_a > rank_b : a.name < b.name;
  });
  int64_t offset = 0;
  for (SafetensorsTensor& tensor : tensors) {
    tensor.offset = offset;
    tensor.bytes = numel_of(tensor.shape) * size_bytes(tensor.type);
    offset += tensor.bytes;
  }
}

std::string format_safetensors_header(const SafetensorsHeader& header, const std::string& file) {
  std::string json = "{";
  const char* separator = "";
  if (!header.metadata.empty()) {
    json += str("\"", kSafetensorsMetadata, "\":", nlohmann::json(header.metadata).dump());
    separator = ",";
  }
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.name == kSafetensorsMetadata)
      throw CheckpointError(file, ": a safetensors file cannot hold a tensor named ", kSafetensorsMetadata);
    json += str(separator, nlohmann::json(tensor.name).dump(), ":{\"dtype\":\"",
                safetensors_type(tensor.type), "\",\"shape\":[", join(tensor.shape, ","),
                "],\"data_offsets\":[", tensor.offset, ",", tensor.offset + tensor.bytes, "]}");
    separator = ",";
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (static_cast<int64_t>(json.size()) > kMaxSafetensorsHeaderBytes)
    throw CheckpointError(file, ": the header has ", json.size(), " bytes, and readers take ",
                          kMaxSafetensorsHeaderBytes,
                          " at most; the model has too many tensors for one file, shards can hold it");
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return out + json;
}

namespace {

constexpr size_t kMaxDimensions = 64;  // libtorch's limit

/// Reads the header into the struct itself: a tree of the JSON could be many times as large as its text.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& file) : in_(text), file_(file) {}

  SafetensorsHeader read() {
    std::set<std::string> names;
    bool has_metadata = false;
    in_.enter_object();
    while (in_.next_key(name_)) {
      if (name_ == kSafetensorsMetadata) {
        if (std::exchange(has_metadata, true)) fail(kSafetensorsMetadata, " occurs twice");
        read_metadata();
      } else {
        if (!names.insert(name_).second) fail("tensor ", quoted_name(name_), " occurs twice");
        header_.tensors.push_back(read_tensor());
      }
    }
    in_.finish();
    return std::move(header_);
  }

 private:
  void read_metadata() {
    if (in_.next() != JsonKind::kObject) fail(kSafetensorsMetadata, " is ", found(), ", expected an object");
    in_.enter_object();
    for (std::string key; in_.next_key(key);) {
      if (header_.metadata.contains(key)) fail(kSafetensorsMetadata, " has ", quoted_name(key), " twice");
      if (in_.next() != JsonKind::kString)
        fail(kSafetensorsMetadata, ": ", quoted_name(key), " is ", found(), ", expected a string");
      header_.metadata.emplace(key, in_.string());
    }
  }

  SafetensorsTensor read_tensor() {
    constexpr std::array<std::string_view, 3> kFields = {"dtype", "shape", "data_offsets"};
    SafetensorsTensor tensor;
    tensor.name = name_;
    std::array<bool, 3> has = {};
    if (in_.next() != JsonKind::kObject) fail_tensor(" is ", found(), ", expected an object");
    in_.enter_object();
    for (std::string key; in_.next_key(key);) {
      const auto field =
          static_cast<size_t>(std::find(kFields.begin(), kFields.end(), key) - kFields.begin());
      if (field == kFields.size())
        fail_tensor(" has the key ", quoted_name(key), ", expected dtype, shape and data_offsets");
      if (std::exchange(has[field], true)) fail_tensor(" has \"", key, "\" twice");
      if (field == 0) tensor.type = read_type();
      if (field == 1) tensor.shape = read_shape();
      if (field == 2) read_offsets(tensor);
    }
    for (size_t i = 0; i < kFields.size(); ++i)
      if (!has[i]) fail_tensor(" has no \"", kFields[i], "\"");
    return tensor;
  }

  DType read_type() {
    if (in_.next() != JsonKind::kString) fail_tensor(": dtype is ", found(), ", expected a string");
    const std::string word = in_.string();
    for (const auto& [type, name] : kSafetensorsTypes)
      if (name == word) return type;
    std::vector<std::string_view> known;
    for (const auto& [type, name] : kSafetensorsTypes) known.push_back(name);
    fail_tensor(": dtype is ", quoted_name(word), ", expected one of ", join(known, ", "));
  }

  std::vector<int64_t> read_shape() {
    std::vector<int64_t> shape;
    read_numbers("shape", "a list of sizes", [&](int64_t size) {
      shape.push_back(size);
      if (shape.size() > kMaxDimensions) fail_tensor(" has more than ", kMaxDimensions, " dimensions");
    });
    return shape;
  }

  void read_offsets(SafetensorsTensor& tensor) {
    std::vector<int64_t> offsets;
    read_numbers("data_offsets", "[BEGIN, END]", [&](int64_t offset) {
      offsets.push_back(offset);
      if (offsets.size() > 2) fail_tensor(": data_offsets has more than two numbers, expected [BEGIN, END]");
    });
    if (offsets.size() != 2 || offsets[0] > offsets[1])
      fail_tensor(": data_offsets is [", join(offsets, ", "), "], expected [BEGIN, END]");
    tensor.offset = offsets[0];
    tensor.bytes = offsets[1] - offsets[0];
  }

  void read_numbers(const char* field, const char* expected, const std::function<void(int64_t)>& add) {
    if (in_.next() != JsonKind::kArray) fail_tensor(": ", field, " has ", found(), ", expected ", expected);
    in_.enter_array();
    while (in_.next_element()) {
      if (in_.next() != JsonKind::kUnsigned)
        fail_tensor(": ", field, " has ", found(), ", expected ", expected);
      const uint64_t number = in_.unsigned_integer();
      if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        fail_tensor(": ", field, " has ", number, ", expected less than 2^63");
      add(static_cast<int64_t>(number));
    }
  }

  std::string found() { return in_.found("an array"); }

  template <class... What>
  [[noreturn]] void fail(const What&... what) {
    throw CheckpointError(file_, ": ", what...);
  }
  template <class... What>
  [[noreturn]] void fail_tensor(const What&... what) {
    fail("tensor ", quoted_name(name_), what...);
  }

  JsonReader in_;
  const std::string& file_;
  SafetensorsHeader header_;
  std::string name_;  // of the tensor that is being read
};

SafetensorsHeader read_header(std::string_view text, const std::string& file) {
  try {
    return HeaderReader(text, file).read();
  } catch (const JsonError& error) {
    throw CheckpointError(file, ": no JSON at byte ", error.offset() + 1, " of the header");
  }
}

void check_size(const SafetensorsTensor& tensor, const std::string& file) {
  int64_t bytes = size_bytes(tensor.type);
  bool overflow = false;
  for (const int64_t size : tensor.shape) overflow = overflow || __builtin_mul_overflow(bytes, size, &bytes);
  if (overflow || bytes != tensor.bytes)
    throw CheckpointError(file, ": tensor ", quoted_name(tensor.name), " has ", tensor.bytes,
                          " bytes of data, expected ", overflow ? std::string("more than 2^63") : str(bytes),
                          " for ", safetensors_type(tensor.type), " and shape ",
                          describe_shape(tensor.shape));
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                           const std::string& file) {
  if (!text.starts_with('{'))
    throw CheckpointError(file, ": no safetensors file: its header does not start with '{'");
  SafetensorsHeader header = read_header(text, file);
  // Tensors without elements come before the one that starts where they do.
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
            });
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    check_size(tensor, file);
    if (tensor.offset != end)
      throw CheckpointError(file, ": tensor ", quoted_name(tensor.name), " starts at byte ", tensor.offset,
                            " of the data, expected ", end,
                            tensor.offset < end ? " (it overlaps another)" : " (there is a hole)");
    end += tensor.bytes;
  }
  if (end != data_bytes)
    throw CheckpointError(file, ": the file has ", data_bytes, " bytes of data, expected ", end,
                          data_bytes < end ? " (it is truncated)" : " (something follows the last tensor)");
  return header;
}

namespace {

using FileByTensor = std::map<std::string, std::string>;

FileByTensor read_weight_map(JsonReader& in) {
  if (in.next() != JsonKind::kObject)
    throw CheckpointError("\"weight_map\" is ", in.found(), ", expected an object");
  FileByTensor files;
  in.enter_object();
  for (std::string name; in.next_key(name);) {
    if (in.next() != JsonKind::kString)
      throw CheckpointError("tensor ", quoted_name(name), " is in ", in.found(),
                            ", expected the name of a file");
    const std::string file = in.string();
    const bool is_name = !file.empty() && file != "." && file != ".." &&
                         file.find_first_of(std::string_view("/\\\0", 3)) == file.npos;
    if (!is_name)
      throw CheckpointError("tensor ", quoted_name(name), " is in ", quoted_name(file),
                            ", expected a file in the index's own folder");
    if (!files.emplace(name, file).second)
      throw CheckpointError("has a tensor twice, in ", quoted_name(file), " the second time");
  }
  return files;
}

/// Throws without the name of the file.
FileByTensor read_index(std::string_view text) {
  JsonReader in(text);
  if (in.next() != JsonKind::kObject) throw CheckpointError("is ", in.found(), ", expected an object");
  std::optional<FileByTensor> files;
  in.enter_object();
  for (std::string key; in.next_key(key);) {
    if (key != "weight_map") {
      in.skip();
      continue;
    }
    if (files) throw CheckpointError("has \"weight_map\" twice");
    files = read_weight_map(in);
  }
  in.finish();
  if (!files) throw CheckpointError("has no \"weight_map\"; expected {\"weight_map\": {NAME: FILE}}");
  return std::move(*files);
}

}  // namespace

FileByTensor parse_safetensors_index(std::string_view text, const std::string& file) {
  try {
    return read_index(text);
  } catch (const JsonError& error) {
    throw CheckpointError(file, ": is no JSON at byte ", error.offset() + 1);
  } catch (const CheckpointError& error) {
    throw CheckpointError(file, ": ", error.what());
  }
}

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

namespace {

/// The format of a file that is not safetensors, by its first bytes; "" if unknown.
std::string other_kind(std::span<const unsigned char, 8> start) {
  const std::string_view text(reinterpret_cast<const char*>(start.data()), start.size());
  const auto begins_with = [&](std::string_view bytes) { return text.starts_with(bytes); };
  if (begins_with("PK\3\4") || (begins_with("\x80") && start[1] >= 2 && start[1] <= 5))
    return "it begins as what torch.save writes, which is read where it is whole, and not as .safetensors";
  if (begins_with("\x89HDF")) return "it is an HDF5 file";
  if (begins_with("version ")) return "it is a Git LFS pointer: git lfs pull brings the file itself";
  return "";
}

SafetensorsHeader read_header(const InputFile& input, std::optional<SafetensorsHashes>& hashes) {
  const std::string file = input.path().string();
  if (input.bytes() < 8)
    throw CheckpointError(file, ": no safetensors file: it has ", input.bytes(),
                          " bytes, expected 8 at least");
  unsigned char length[8];
  input.read_at(0, std::as_writable_bytes(std::span(length)));
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | length[i];
  const auto room = static_cast<uint64_t>(input.bytes() - 8);
  if (header_bytes > kMaxSafetensorsHeaderBytes || header_bytes > room) {
    if (const std::string kind = other_kind(length); !kind.empty())
      throw CheckpointError(file, ": is not safetensors: ", kind);
    throw CheckpointError(file, ": the header's length is ", header_bytes, ", expected at most ",
                          std::min<uint64_t>(room, kMaxSafetensorsHeaderBytes),
                          header_bytes > room ? " (what the file has left)" : "");
  }
  const auto data_begin = static_cast<int64_t>(8 + header_bytes);
  std::string head(8 + header_bytes, '\0');
  input.read_at(0, std::as_writable_bytes(std::span(head)));
  SafetensorsHeader header =
      parse_safetensors_header(std::string_view(head).substr(8), input.bytes() - data_begin, file);
  hashes = SafetensorsHashes::read(head, header, file);
  for (SafetensorsTensor& tensor : header.tensors) tensor.offset += data_begin;
  return header;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : input_(path), header_(read_header(input_, hashes_)) {
  for (const SafetensorsTensor& tensor : header_.tensors) by_name_[tensor.name] = &tensor;
}

const SafetensorsTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

void SafetensorsFile::read_at(int64_t offset, std::span<std::byte> destination) const {
  if (destination.empty()) return;
  const auto behind =
      std::partition_point(header_.tensors.begin(), header_.tensors.end(),
                           [&](const SafetensorsTensor& one) { return one.offset <= offset; });
  // Empty tensors may have the offset of the one that is meant, and come before or after it.
  const auto found =
      std::find_if(std::make_reverse_iterator(behind), header_.tensors.rend(),
                   [&](const SafetensorsTensor& one) { return offset < one.offset + one.bytes; });
  TESSERA_CHECK(found != header_.tensors.rend(), "byte ", offset, " of no tensor");
  const SafetensorsTensor& tensor = *found;
  const int64_t begin = offset - tensor.offset, bytes = std::ssize(destination);
  TESSERA_CHECK(bytes <= tensor.bytes - begin, "bytes ", begin, " to ", begin + bytes, " of ", tensor.name,
                ", which has ", tensor.bytes);
  if (!hashes_) return input_.read_at(offset, destination);
  std::vector<std::byte> scratch;
  for (int64_t next = begin; !destination.empty();) {
    const int64_t block = next / kBlockBytes, skip = next % kBlockBytes,
                  in_block = std::min(kBlockBytes, tensor.bytes - block * kBlockBytes);
    const auto part = destination.first(
        static_cast<size_t>(std::min<int64_t>(in_block - skip, static_cast<int64_t>(destination.size()))));
    if (static_cast<int64_t>(part.size()) == in_block) {
      read_block(tensor, block, part);
    } else {
      scratch.resize(static_cast<size_t>(in_block));
      read_block(tensor, block, scratch);
      std::copy_n(scratch.begin() + skip, part.size(), part.begin());
    }
    next += static_cast<int64_t>(part.size());
    destination = destination.subspan(part.size());
  }
}

void SafetensorsFile::read_block(const SafetensorsTensor& tensor, int64_t block,
                                 std::span<std::byte> into) const {
  const int64_t begin = tensor.offset + block * kBlockBytes;
  input_.read_at(begin, into);
  const auto index = static_cast<size_t>(&tensor - header_.tensors.data());
  const uint64_t found = hash_block(into), expected = hashes_->expected(index, block);
  if (found != expected)
    throw CheckpointError(path(), ": tensor ", quoted_name(tensor.name), " is damaged between bytes ", begin,
                          " and ", begin + static_cast<int64_t>(into.size()), " of the file: found hash ",
                          hashes_to_hex({&found, 1}), "; expected ", hashes_to_hex({&expected, 1}));
}

}  // namespace tessera::checkpoint

#include "checkpoint/formats/safetensors_reader.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
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

void SafetensorsFile::read(const SafetensorsTensor& tensor, int64_t begin,
                           std::span<std::byte> destination) const {
  const auto bytes = static_cast<int64_t>(destination.size());
  TESSERA_CHECK(begin >= 0 && begin <= tensor.bytes && bytes <= tensor.bytes - begin, "bytes ", begin, " to ",
                begin + bytes, " of ", tensor.name, ", which has ", tensor.bytes);
  if (!hashes_) return input_.read_at(tensor.offset + begin, destination);
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
  const SafetensorsTensor* ours = find(tensor.name);
  TESSERA_CHECK(ours != nullptr, tensor.name);
  const auto index = static_cast<size_t>(ours - header_.tensors.data());
  const uint64_t found = hash_block(into), expected = hashes_->expected(index, block);
  if (found != expected)
    throw CheckpointError(path(), ": tensor ", quoted_name(tensor.name), " is damaged between bytes ", begin,
                          " and ", begin + static_cast<int64_t>(into.size()), " of the file: found hash ",
                          hashes_to_hex({&found, 1}), "; expected ", hashes_to_hex({&expected, 1}));
}

void SafetensorsFile::read_at(int64_t offset, std::span<std::byte> destination) const {
  const auto behind =
      std::partition_point(header_.tensors.begin(), header_.tensors.end(),
                           [&](const SafetensorsTensor& one) { return one.offset <= offset; });
  // Empty tensors may have the offset of the one that is meant, and come before or after it.
  const auto tensor =
      std::find_if(std::make_reverse_iterator(behind), header_.tensors.rend(),
                   [&](const SafetensorsTensor& one) { return offset < one.offset + one.bytes; });
  TESSERA_CHECK(tensor != header_.tensors.rend(), "byte ", offset, " of no tensor");
  read(*tensor, offset - tensor->offset, destination);
}

}  // namespace tessera::checkpoint

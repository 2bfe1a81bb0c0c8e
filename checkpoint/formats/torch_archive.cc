#include "checkpoint/formats/torch_archive.h"

#include <zlib.h>

#include "core/check.h"

namespace tessera::checkpoint {
namespace {

constexpr int64_t kAlignment = 64;  // torch.utils.serialization.config.save.storage_alignment
constexpr int64_t kLimit32 = 0xffffffff;
constexpr int64_t kLocalHeaderBytes = 30;
constexpr int64_t kPaddingFieldBytes = 4;
constexpr uint16_t kZip64Field = 0x0001;
constexpr uint16_t kVersion = 20;  // folders
constexpr uint16_t kVersionZip64 = 45;
constexpr uint16_t kUtf8Name = 1 << 11;
constexpr uint16_t kHasDescriptor = 1 << 3;
constexpr uint16_t kDate = 1 << 5 | 1;  // 1980-01-01, so that equal models are equal files

class Fields {
 public:
  Fields& u16(uint64_t value) { return put(value, 2); }
  Fields& u32(uint64_t value) { return put(value, 4); }
  Fields& u64(uint64_t value) { return put(value, 8); }
  Fields& text(const std::string& value) {
    bytes_ += value;
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  Fields& put(uint64_t value, int num_bytes) {
    for (int i = 0; i < num_bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
    return *this;
  }
  std::string bytes_;
};

uint64_t u(int64_t value) { return static_cast<uint64_t>(value); }
uint64_t clipped(int64_t value) { return u(value < kLimit32 ? value : kLimit32); }

bool is_large(const TorchZip::Entry& entry) { return entry.bytes >= kLimit32; }
bool is_far(const TorchZip::Entry& entry) { return entry.header_offset >= kLimit32; }

// The sizes and the offset that do not fit the header's own 32 bits.
std::string zip64_field(const TorchZip::Entry& entry) {
  if (!is_large(entry) && !is_far(entry)) return "";
  Fields fields;
  fields.u16(kZip64Field).u16((is_large(entry) ? 16u : 0u) + (is_far(entry) ? 8u : 0u));
  if (is_large(entry)) fields.u64(u(entry.bytes)).u64(u(entry.bytes));
  if (is_far(entry)) fields.u64(u(entry.header_offset));
  return fields.bytes();
}

uint16_t flags_of(const TorchZip::Entry& entry) {
  return entry.bytes > 0 ? kUtf8Name | kHasDescriptor : kUtf8Name;
}
uint16_t version_of(const TorchZip::Entry& entry) {
  return is_large(entry) || is_far(entry) ? kVersionZip64 : kVersion;
}

uint32_t crc_of(uint32_t crc, std::span<const std::byte> data) {
  return static_cast<uint32_t>(crc32_z(crc, reinterpret_cast<const Bytef*>(data.data()), data.size()));
}

}  // namespace

size_t TorchZip::add(const std::string& name, int64_t bytes) {
  Entry entry;
  entry.name = "archive/" + name;
  TESSERA_CHECK(entry.name.size() < 65'000, "entry name of ", entry.name.size(), " bytes");
  entry.bytes = bytes;
  entry.header_offset = first_offset_;
  if (!entries_.empty())
    entry.header_offset =
        data_end(entries_.size() - 1) + static_cast<int64_t>(descriptor(entries_.back(), 0).size());
  const int64_t fixed = entry.header_offset + kLocalHeaderBytes +
                        static_cast<int64_t>(entry.name.size() + zip64_field(entry).size()) +
                        kPaddingFieldBytes;
  entry.data_offset = (fixed + kAlignment - 1) / kAlignment * kAlignment;
  entries_.push_back(std::move(entry));
  return entries_.size() - 1;
}

std::string TorchZip::local_header(const Entry& entry) const {
  const std::string zip64 = zip64_field(entry);
  const int64_t extra_bytes =
      entry.data_offset - entry.header_offset - kLocalHeaderBytes - static_cast<int64_t>(entry.name.size());
  const int64_t padding = extra_bytes - static_cast<int64_t>(zip64.size()) - kPaddingFieldBytes;
  Fields fields;
  fields.text("PK\3\4").u16(version_of(entry)).u16(flags_of(entry)).u16(0).u16(0).u16(kDate);
  fields.u32(0).u32(0).u32(0);  // CRC and sizes: in the descriptor
  fields.u16(entry.name.size()).u16(u(extra_bytes)).text(entry.name).text(zip64);
  fields.text("FB").u16(u(padding)).text(std::string(static_cast<size_t>(padding), 'Z'));
  return fields.bytes();
}

std::string TorchZip::descriptor(const Entry& entry, uint32_t crc) const {
  if (entry.bytes == 0) return "";
  Fields fields;
  fields.text("PK\7\10").u32(crc);
  if (is_large(entry) || is_far(entry)) return fields.u64(u(entry.bytes)).u64(u(entry.bytes)).bytes();
  return fields.u32(u(entry.bytes)).u32(u(entry.bytes)).bytes();
}

std::string TorchZip::central_header(const Entry& entry, uint32_t crc) const {
  const std::string zip64 = zip64_field(entry);
  Fields fields;
  fields.text("PK\1\2")
      .u16(version_of(entry))
      .u16(version_of(entry))
      .u16(flags_of(entry))
      .u16(0)
      .u16(0)
      .u16(kDate);
  fields.u32(crc)
      .u32(clipped(entry.bytes))
      .u32(clipped(entry.bytes))
      .u16(entry.name.size())
      .u16(zip64.size());
  fields.u16(0).u16(0).u16(0).u32(0);  // comment, disk, attributes
  fields.u32(clipped(entry.header_offset)).text(entry.name).text(zip64);
  return fields.bytes();
}

std::string TorchZip::between(size_t index, uint32_t previous_crc) const {
  const std::string before = index == 0 ? "" : descriptor(entries_[index - 1], previous_crc);
  return before + local_header(entries_[index]);
}

std::string TorchZip::tail(const std::vector<uint32_t>& crcs) const {
  TESSERA_CHECK(!entries_.empty() && crcs.size() == entries_.size());
  std::string before = descriptor(entries_.back(), crcs.back());
  const int64_t directory_offset = data_end(entries_.size() - 1) + static_cast<int64_t>(before.size());
  std::string directory;
  for (size_t i = 0; i < entries_.size(); ++i) directory += central_header(entries_[i], crcs[i]);
  const auto directory_bytes = static_cast<int64_t>(directory.size());
  const auto num_entries = static_cast<int64_t>(entries_.size());

  Fields end;
  end.text("PK\6\6").u64(44).u16(kVersionZip64).u16(kVersionZip64).u32(0).u32(0);
  end.u64(u(num_entries)).u64(u(num_entries)).u64(u(directory_bytes)).u64(u(directory_offset));
  end.text("PK\6\7").u32(0).u64(u(directory_offset + directory_bytes)).u32(1);
  const uint64_t num16 = u(num_entries < 0xffff ? num_entries : 0xffff);
  end.text("PK\5\6")
      .u16(0)
      .u16(0)
      .u16(num16)
      .u16(num16)
      .u32(clipped(directory_bytes))
      .u32(clipped(directory_offset))
      .u16(0);
  return before + directory + end.bytes();
}

int64_t TorchZip::file_bytes() const {
  const std::vector<uint32_t> any(entries_.size());
  return data_end(entries_.size() - 1) + static_cast<int64_t>(tail(any).size());
}

TorchArchive::TorchArchive(std::string pickle, const std::vector<int64_t>& storages) {
  texts_ = {{"data.pkl", std::move(pickle)},
            {".format_version", "1"},
            {".storage_alignment", "64"},
            {"byteorder", "little"}};
  for (const auto& [name, text] : texts_) zip_.add(name, static_cast<int64_t>(text.size()));
  for (size_t i = 0; i < storages.size(); ++i) zip_.add("data/" + std::to_string(i), storages[i]);
  zip_.add("version", static_cast<int64_t>(kVersion.size()));
  crcs_.assign(zip_.entries().size(), 0);
}

void TorchArchive::write(OutputFile& file, int64_t base, size_t storage, int64_t offset,
                         std::span<const std::byte> data) {
  const size_t entry = texts_.size() + storage;
  file.write_at(base + zip_.entries()[entry].data_offset + offset, data);
  crcs_[entry] = crc_of(crcs_[entry], data);
}

void TorchArchive::write_text(OutputFile& file, int64_t base, size_t entry, std::string_view text) {
  const auto data = std::as_bytes(std::span(text));
  file.write_at(base + zip_.entries()[entry].data_offset, data);
  crcs_[entry] = crc_of(0, data);
}

void TorchArchive::finish(OutputFile& file, int64_t base) {
  for (size_t i = 0; i < texts_.size(); ++i) write_text(file, base, i, texts_[i].second);
  write_text(file, base, zip_.entries().size() - 1, kVersion);
  for (size_t i = 0; i < zip_.entries().size(); ++i) {
    const std::string between = zip_.between(i, i == 0 ? 0 : crcs_[i - 1]);
    file.write_at(base + (i == 0 ? 0 : zip_.data_end(i - 1)), std::as_bytes(std::span(between)));
  }
  const std::string tail = zip_.tail(crcs_);
  file.write_at(base + zip_.data_end(zip_.entries().size() - 1), std::as_bytes(std::span(tail)));
}

}  // namespace tessera::checkpoint

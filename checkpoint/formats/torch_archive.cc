#include "checkpoint/formats/torch_archive.h"

#include <zlib.h>

namespace tessera::checkpoint {
namespace {

uint32_t crc_of(uint32_t crc, std::span<const std::byte> data) {
  return static_cast<uint32_t>(crc32_z(crc, reinterpret_cast<const Bytef*>(data.data()), data.size()));
}

}  // namespace

TorchArchive::TorchArchive(std::string pickle, const std::vector<int64_t>& storages) : zip_("archive") {
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

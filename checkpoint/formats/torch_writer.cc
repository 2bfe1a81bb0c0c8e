#include "checkpoint/formats/torch_writer.h"

#include <zlib.h>

#include <string_view>

#include "checkpoint/formats/torch_pickle.h"
#include "checkpoint/formats/torch_zip.h"
#include "core/files/pending_file.h"

namespace tessera::checkpoint {
namespace {

uint32_t crc_of(uint32_t crc, std::span<const std::byte> data) {
  return static_cast<uint32_t>(crc32_z(crc, reinterpret_cast<const Bytef*>(data.data()), data.size()));
}

class TorchFileWriter : public ModelWriter {
 public:
  TorchFileWriter(const Disk& disk, ModelWriterOptions options)
      : ModelWriter(std::move(options.tensors)), zip_("archive"), file_(disk, options.path) {
    texts_ = {{"data.pkl", state_dict_pickle(tensors())},
              {".format_version", "1"},
              {".storage_alignment", "64"},
              {"byteorder", "little"}};
    for (const auto& [name, text] : texts_) zip_.add(name, static_cast<int64_t>(text.size()));
    for (size_t i = 0; i < tensors().size(); ++i) zip_.add("data/" + std::to_string(i), tensors()[i].bytes());
    zip_.add("version", static_cast<int64_t>(kVersion.size()));
    crcs_.assign(zip_.entries().size(), 0);
    file_.file().reserve(zip_.file_bytes());
  }

 private:
  static constexpr std::string_view kVersion = "3\n";

  void write(size_t index, int64_t offset, std::span<const std::byte> data) override {
    const size_t entry = texts_.size() + index;
    file_.file().write_at(zip_.entries()[entry].data_offset + offset, data);
    crcs_[entry] = crc_of(crcs_[entry], data);
  }

  void write_text(size_t entry, std::string_view text) {
    const auto data = std::as_bytes(std::span(text));
    file_.file().write_at(zip_.entries()[entry].data_offset, data);
    crcs_[entry] = crc_of(0, data);
  }

  void publish() override {
    for (size_t i = 0; i < texts_.size(); ++i) write_text(i, texts_[i].second);
    write_text(zip_.entries().size() - 1, kVersion);
    for (size_t i = 0; i < zip_.entries().size(); ++i) {
      const std::string between = zip_.between(i, i == 0 ? 0 : crcs_[i - 1]);
      file_.file().write_at(i == 0 ? 0 : zip_.data_end(i - 1), std::as_bytes(std::span(between)));
    }
    const std::string tail = zip_.tail(crcs_);
    file_.file().write_at(zip_.data_end(zip_.entries().size() - 1), std::as_bytes(std::span(tail)));
    file_.publish();
  }

  std::vector<std::pair<std::string, std::string>> texts_;  // the entries before the data
  TorchZip zip_;
  std::vector<uint32_t> crcs_;  // by entry
  PendingFile file_;
};

}  // namespace

std::unique_ptr<ModelWriter> open_torch_file(const Disk& disk, ModelWriterOptions options) {
  return std::make_unique<TorchFileWriter>(disk, std::move(options));
}

}  // namespace tessera::checkpoint

#include "checkpoint/formats/hdf5_writer.h"

#include "checkpoint/hdf5/hdf5_image.h"
#include "core/files/pending_file.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

std::string dataset_path(const std::string& name) { return str("/", hdf5_name(name)); }

class Hdf5FileWriter : public ModelWriter {
 public:
  Hdf5FileWriter(const Disk& disk, ModelWriterOptions options)
      : ModelWriter(std::move(options.tensors)),
        image_(build(options.path.filename().string(), tensors())),
        file_(disk, options.path) {
    file_.file().reserve(image_.file_bytes);
  }

 private:
  static Hdf5Image build(const std::string& purpose, const std::vector<ModelTensor>& tensors) {
    Hdf5Builder builder(purpose, Hdf5Readers::kSince1_8);
    for (const ModelTensor& tensor : tensors) {
      builder.add({dataset_path(tensor.name), tensor.type, tensor.shape, {}});
      for (const std::string& alias : tensor.aliases)
        builder.add_link(dataset_path(tensor.name), dataset_path(alias));
    }
    return builder.finish();
  }

  void write(size_t index, int64_t offset, std::span<const std::byte> data) override {
    file_.file().write_at(image_.offsets[index] + offset, data);
  }

  void publish() override {
    for (const Hdf5Image::Piece& piece : image_.metadata)
      file_.file().write_at(piece.offset, std::as_bytes(std::span(piece.bytes)));
    file_.publish();
  }

  Hdf5Image image_;
  PendingFile file_;
};

}  // namespace

std::unique_ptr<ModelWriter> open_hdf5_file(const Disk& disk, ModelWriterOptions options) {
  return std::make_unique<Hdf5FileWriter>(disk, std::move(options));
}

}  // namespace tessera::checkpoint

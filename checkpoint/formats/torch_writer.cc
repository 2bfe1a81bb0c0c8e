#include "checkpoint/formats/torch_writer.h"

#include <string>
#include <vector>

#include "checkpoint/formats/pickle_writer.h"
#include "checkpoint/formats/torch_archive.h"
#include "core/files/pending_file.h"

namespace tessera::checkpoint {
namespace {

std::string state_dict_pickle(const std::vector<ModelTensor>& tensors) {
  PickleWriter pickle;
  pickle.begin_ordered_dict();
  for (size_t i = 0; i < tensors.size(); ++i) {
    pickle.text(tensors[i].name).tensor(tensors[i].type, tensors[i].shape, i);
    for (const std::string& alias : tensors[i].aliases)
      pickle.text(alias).tensor(tensors[i].type, tensors[i].shape, i);
  }
  return pickle.end_dict().finish();
}

std::vector<int64_t> sizes_of(const std::vector<ModelTensor>& tensors) {
  std::vector<int64_t> sizes;
  for (const ModelTensor& tensor : tensors) sizes.push_back(tensor.bytes());
  return sizes;
}

class TorchFileWriter : public ModelWriter {
 public:
  TorchFileWriter(const Disk& disk, ModelWriterOptions options)
      : ModelWriter(std::move(options.tensors)),
        archive_(state_dict_pickle(tensors()), sizes_of(tensors())),
        file_(disk, options.path) {
    file_.file().reserve(archive_.bytes());
  }

 private:
  void write(size_t index, int64_t offset, std::span<const std::byte> data) override {
    archive_.write(file_.file(), 0, index, offset, data);
  }

  void publish() override {
    archive_.finish(file_.file(), 0);
    file_.publish();
  }

  TorchArchive archive_;
  PendingFile file_;
};

}  // namespace

std::unique_ptr<ModelWriter> open_torch_file(const Disk& disk, ModelWriterOptions options) {
  return std::make_unique<TorchFileWriter>(disk, std::move(options));
}

}  // namespace tessera::checkpoint

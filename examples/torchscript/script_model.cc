#include "examples/torchscript/script_model.h"

#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <filesystem>
#include <stdexcept>
#include <vector>

#include "comm/c10_words.h"
#include "core/error.h"
#include "core/input_file.h"
#include "core/str.h"
#include "core/utf8.h"
#include "train/out_of_memory.h"

namespace tessera::examples {
namespace {

void check_trainable(const torch::jit::Module& model, const std::string& path) {
  int64_t num_parameters = 0, num_trainable = 0;
  for (const at::Tensor& parameter : model.parameters()) {
    ++num_parameters;
    num_trainable += parameter.requires_grad() ? 1 : 0;
  }
  if (num_parameters == 0)
    throw DataError(str(path, ": the module has no parameters; expected one that torch.jit.freeze has not turned into constants"));
  if (num_trainable == 0)
    throw DataError(str(path, ": none of the module's ", num_parameters, " parameters requires a gradient; nothing could be trained"));
}

}  // namespace

std::shared_ptr<torch::jit::Module> load_script_model(const std::string& path) {
  const std::string expected = "; expected a file that torch.jit.save wrote";
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) throw DataError(str(path, ": is a folder", expected));
  try {
    check_input(path);
  } catch (const DiskError& error) {
    throw DataError(str(path, ": cannot be opened: ", error.reason(), expected));
  }
  std::shared_ptr<torch::jit::Module> model;
  try {
    model = std::make_shared<torch::jit::Module>(torch::jit::load(path, c10::Device(at::kCPU)));
  } catch (const std::exception& caught) {
    throw DataError(str(path, ": no TorchScript module: ", comm::words_of(caught), expected));
  }
  check_trainable(*model, path);
  return model;
}

at::Tensor tensor_of(const c10::IValue& value, const std::string& key, const std::string& path) {
  if (value.isTensor()) return value.toTensor();
  if (value.isTuple() && !value.toTupleRef().elements().empty()) return tensor_of(value.toTupleRef().elements()[0], key, path);
  if (value.isList() && !value.toListRef().empty()) return tensor_of(value.toListRef()[0], key, path);
  if (value.isGenericDict()) {
    const auto entries = value.toGenericDict();
    std::vector<std::string> names;
    for (const auto& entry : entries) {
      names.push_back(entry.key().isString() ? quoted_name(entry.key().toStringRef()) : "?");
      if (entries.size() == 1 || (entry.key().isString() && entry.key().toStringRef() == key)) return tensor_of(entry.value(), key, path);
    }
    throw DataError(str(path, ": forward gives a dictionary of ", join(names, ", "), "; expected an entry ", quoted_name(key)));
  }
  throw DataError(str(path, ": forward gives a ", value.tagKind(), "; expected a tensor, or a tuple or dictionary of them"));
}

void rethrow_of_model(const std::string& path, const std::function<std::string()>& origin) {
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::logic_error&) {
    throw;
  } catch (const std::exception& error) {
    if (train::is_out_of_memory(error)) throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, comm::words_of(error));
    throw DataError(str(origin(), ": ", path, ": forward failed: ", comm::words_of(error)));
  }
}

}  // namespace tessera::examples

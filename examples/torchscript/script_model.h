// Reads TorchScript files and interprets the outputs of their modules.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "examples/torchscript/script_file.h"

namespace torch::jit {
struct Module;
}

namespace tessera::examples {

struct ScriptModel {
  std::shared_ptr<torch::jit::Module> module;
  std::unique_ptr<ScriptFile> file;  ///< in which the module's tensors lie
};

/// Opens what torch.jit.save wrote, on the CPU, with libtorch's own unpickler, which makes tensors and
/// TorchScript values and runs no Python. (The TorchScript inside is a program all the same, and may run when
/// it is loaded.) Tensors lie in the file until ScriptFile::detach(): see [Note: TorchScript files are
/// mapped]. Throws DataError naming the file when it cannot be read, is something else (torch.save's files),
/// or holds nothing to train.
ScriptModel load_script_model(const std::string& path);

/// What a forward is to be called with, by the names that a configuration has for it.
struct CallOfForward {
  std::vector<std::string> inputs;  ///< data.inputs
  std::string target;  ///< data.target, where forward takes it last and gives the loss; empty: it takes the
                       ///< inputs alone
};
/// Throws DataError, starting with `path`, where forward takes another number of arguments,
/// and names the key that says otherwise.
void check_arguments(const torch::jit::Module& model, const std::string& path, const CallOfForward& call);
/// Makes `evaluation`, another trace of the model `training`, read its parameters and buffers: those
/// of equal names become the same tensors, so that there is no second copy, and what moves the ones moves the
/// others. Buffers that `training` lacks stay its own, and are returned. Throws DataError, with the two
/// files' names, unless both have parameters of the same names and shapes.
std::vector<at::Tensor> share_parameters(torch::jit::Module& evaluation, const std::string& path,
                                         const torch::jit::Module& training,
                                         const std::string& training_path);

/// The same for the buffers alone, as `training` has them now.
void share_buffers(torch::jit::Module& evaluation, const torch::jit::Module& training);

/// The tensor meant in what forward gave: itself; of a dictionary the entry `key`, or its only one; of
/// a tuple or list the first. Throws DataError, starting with `path`, when there is none.
at::Tensor tensor_of(const c10::IValue& value, const std::string& key, const std::string& path);

/// All tensors in what forward gave, with names for files: "output" for a single one; the
/// keys of a dictionary; "output_0" … of a tuple or list; inside of others "NAME.KEY" and
/// "NAME.0". What is no tensor is left out.
std::vector<std::pair<std::string, at::Tensor>> tensors_of(const c10::IValue& value);

/// Must be called while handling an exception that came out of a model's forward. What the model did wrong
/// (shapes, types, a raise) is thrown as a DataError of one line: `origin()`, which is where its arguments
/// come from, `path`, and the reason; running out of memory as c10::OutOfMemoryError; all else as it is.
[[noreturn]] void rethrow_of_model(const std::string& path, const std::function<std::string()>& origin);

}  // namespace tessera::examples

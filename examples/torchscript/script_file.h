// ScriptFile: a TorchScript file whose tensors are read in place.
//
// [Note: TorchScript files are mapped]
// torch::jit::load() allocates memory for each record of the archive and reads it there, so each rank would
// hold a whole copy of the model until its parameters are in the engine's units. torch.jit.save stores
// tensors uncompressed and aligned to 64 bytes. So the file is mapped, and a tensor's storage is a part of
// the mapping: the ranks of a host share its pages through the page cache. Each entry is first compared with
// its CRC-32, which libtorch's loader leaves out. When a storage goes, its pages are unmapped, so that a
// process never has more of the model than it is using. The mapping is private: what is written into a tensor
// stays in the process. A record that is compressed or not aligned (other programs write such archives) is
// read into memory.
//
// libtorch's loader cannot be told where a record's memory is. But the functions that it is made of are
// public: the reader of archives, the importer of sources, and an unpickler that takes storages which exist
// already (torch.package shares storages that way). load() calls these. It leaves out two things of
// torch::jit::load(): the places in the Python code for tracebacks, which are not shown, and the rewriting of
// quantized convolutions of PyTorch 1.4.
//
// A process that reads a page behind the end of a file that another process has cut since gets SIGBUS, and
// there is no error to catch. So the time is kept short: detach() copies what still lies in the file, which
// are buffers and constants, and the file may then be changed at will.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <sys/stat.h>

#include <memory>
#include <string>
#include <vector>

#include "core/files/file_descriptor.h"

namespace torch::jit {
struct Module;
}

namespace tessera::examples {

class PrivateMapping;

/// Not thread-safe. Its storages keep the mapping alive.
class ScriptFile {
 public:
  /// Opens and maps a file. Throws DiskError.
  explicit ScriptFile(std::string path);
  ~ScriptFile();
  ScriptFile(const ScriptFile&) = delete;
  ScriptFile& operator=(const ScriptFile&) = delete;

  /// The module, on the CPU. To be called once. Throws c10::Error; CheckpointError
  /// if an entry differs from its CRC-32; DataError if a tensor exceeds its record.
  std::shared_ptr<torch::jit::Module> load();

  /// Gives storages that are still in use memory of their own, and closes the file. Throws DataError
  /// if the file was written to since it was opened.
  void detach();

  /// Bytes of the storages in use that lie in the mapping. For tests.
  int64_t mapped_bytes() const;

 private:
  std::string path_;
  FileDescriptor descriptor_;
  struct stat opened_{};
  std::shared_ptr<PrivateMapping> mapping_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> in_mapping_;
};

}  // namespace tessera::examples

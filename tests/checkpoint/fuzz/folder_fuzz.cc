// A whole checkpoint, damaged as the input says: what opens and reads without an error is the undamaged data.
//
// The input is a list of damages of 8 bytes each: which file, what to do, where
// (4 bytes), with what (2 bytes).
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "checkpoint/read/reader.h"
#include "core/error.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/support/files.h"

namespace {

using namespace tessera;
using namespace tessera::checkpoint;
using namespace tessera::checkpoint::testing;
namespace fs = std::filesystem;

constexpr size_t kDamageBytes = 8;
constexpr size_t kMaxDamages = 4;

class Target {
 public:
  Target() : model_(sample_model(2, 7)) {
    save_all(model_, folder_.path(), "step7", [](int) { return DiskOptions{.sync = false, .probe = {}}; });
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
      if (entry.is_regular_file()) files_[entry.path()] = read_text(entry.path());
    }
  }

  /// Of one damage; the folder is put right by heal().
  void damage(const uint8_t* bytes) {
    auto file = files_.begin();
    std::advance(file, bytes[0] % files_.size());
    std::string content = current(file->first);
    uint32_t place = 0;
    std::memcpy(&place, bytes + 2, sizeof place);
    const size_t at = content.empty() ? 0 : place % content.size();
    switch (bytes[1] % 6) {
      case 0:
        if (!content.empty()) content[at] = static_cast<char>(bytes[6]);
        break;
      case 1:
        if (!content.empty()) content[at] = static_cast<char>(content[at] ^ (1 << bytes[6] % 8));
        break;
      case 2: content.resize(at); break;
      case 3: content.insert(at, bytes[6] + 1u, static_cast<char>(bytes[7])); break;
      case 4: content.erase(at, bytes[6] + 1u); break;
      case 5:
        fs::remove(file->first);
        damaged_[file->first] = "";
        return;
    }
    std::ofstream(file->first, std::ios::binary | std::ios::trunc) << content;
    damaged_[file->first] = content;
  }

  void heal() {
    for (const auto& [path, content] : damaged_)
      std::ofstream(path, std::ios::binary | std::ios::trunc) << files_[path];
    damaged_.clear();
  }

  void read() const {
    try {
      if (!model_.difference(Checkpoint::open(folder_.path())).empty()) __builtin_trap();
    } catch (const Error&) {
    }
    bool changed = false;  // the checkpoint itself; `latest` is not part of it
    for (const auto& [path, content] : damaged_)
      changed = changed || (path.filename() != "latest" && (!fs::exists(path) || content != files_.at(path)));
    try {
      if (verify(folder_.path(), "step7").ok() == changed) __builtin_trap();
    } catch (const Error&) {
      if (!changed) __builtin_trap();
    }
  }

 private:
  std::string current(const fs::path& path) const {
    const auto found = damaged_.find(path);
    return found == damaged_.end() ? files_.at(path) : found->second;
  }

  MemoryFolder folder_;
  SampleModel model_;
  std::map<fs::path, std::string> files_;
  std::map<fs::path, std::string> damaged_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Target target;
  for (size_t i = 0; i < kMaxDamages && (i + 1) * kDamageBytes <= size; ++i)
    target.damage(data + i * kDamageBytes);
  target.read();
  target.heal();
  return 0;
}

#include "checkpoint/read/verify.h"

#include <algorithm>
#include <optional>

#include "checkpoint/block_hashes.h"
#include "checkpoint/read/reader.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxProblemsPerFile = 20;

/// Names of the datasets with bytes in a range, for messages.
std::string datasets_in(const FileRecord& file, int64_t begin, int64_t end) {
  std::string names;
  for (const DatasetRecord& dataset : file.datasets)
    if (dataset.bytes > 0 && dataset.offset < end && dataset.offset + dataset.bytes > begin)
      names += ", " + dataset.name;
  return names;
}

/// Verifies one checkpoint. Used by one thread, once.
class Verifier {
 public:
  Verifier(const Checkpoint& checkpoint, const std::function<void(int64_t, int64_t)>& progress)
      : checkpoint_(checkpoint), progress_(progress), block_(kBlockBytes) {}

  VerifyReport run() {
    int index = 0;
    for (const FileRecord& file : checkpoint_.manifest().files) {
      ++report_.num_files;
      const size_t num_before = report_.problems.size();
      try {
        verify(file, checkpoint_.file(index++));
      } catch (const DiskError& error) {
        report_.problems.push_back(str(file.name, ": ", error.what()));
      }
      report_.by_file.push_back(report_.problems.size() > num_before ? report_.problems[num_before] : "");
    }
    return std::move(report_);
  }

 private:
  void verify(const FileRecord& file, const InputFile& input) {
    if (input.bytes() != file.bytes)
      report_.problems.push_back(
          str(file.name, ": found ", input.bytes(), " bytes; expected ", file.bytes,
              input.bytes() > file.bytes ? ": bytes were added at its end" : ": it is cut off"));
    size_t num_bad = 0;
    for (int64_t block = 0; block < num_blocks(std::min(file.bytes, input.bytes())); ++block) {
      const int64_t begin = block * kBlockBytes, end = std::min(begin + kBlockBytes, file.bytes);
      if (end > input.bytes()) break;  // the file ends within this block: reported above
      const auto bytes = std::span(block_).first(static_cast<size_t>(end - begin));
      input.read_at(begin, bytes);
      ++report_.num_blocks;
      report_.bytes += end - begin;
      if (hash_block(bytes) != file.block_hashes[block] && ++num_bad <= kMaxProblemsPerFile)
        report_.problems.push_back(str(file.name, ": block ", block, " (bytes ", begin, " to ", end,
                                       datasets_in(file, begin, end), ") is damaged"));
      if (progress_) progress_(report_.bytes, checkpoint_.manifest().total_bytes());
    }
    if (num_bad > kMaxProblemsPerFile)
      report_.problems.push_back(str(file.name, ": ", num_bad - kMaxProblemsPerFile, " more damaged blocks"));
  }

  const Checkpoint& checkpoint_;
  const std::function<void(int64_t, int64_t)>& progress_;
  std::vector<std::byte> block_;
  VerifyReport report_;
};

}  // namespace

VerifyReport verify(const Checkpoint& checkpoint, const std::function<void(int64_t, int64_t)>& progress) {
  return Verifier(checkpoint, progress).run();
}

VerifyReport verify(const fs::path& directory, const std::string& tag,
                    const std::function<void(int64_t, int64_t)>& progress) {
  return verify(Checkpoint::open_damaged(directory, tag), progress);
}

}  // namespace tessera::checkpoint

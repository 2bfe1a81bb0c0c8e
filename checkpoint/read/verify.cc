#include "checkpoint/read/verify.h"

#include <algorithm>
#include <cstring>
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

/// Elements of fp32, bf16, fp16 and fp64 whose exponent has all its bits.
int64_t num_nonfinite(std::span<const std::byte> bytes, DType type) {
  const auto count = [&]<class Bits>(Bits exponent) {
    int64_t found = 0;
    for (size_t at = 0; at + sizeof(Bits) <= bytes.size(); at += sizeof(Bits)) {
      Bits bits;
      std::memcpy(&bits, bytes.data() + at, sizeof(Bits));
      found += (bits & exponent) == exponent ? 1 : 0;
    }
    return found;
  };
  switch (type) {
    case DType::kFloat32: return count(uint32_t{0x7f800000});
    case DType::kBFloat16: return count(uint16_t{0x7f80});
    case DType::kFloat16: return count(uint16_t{0x7c00});
    case DType::kFloat64: return count(uint64_t{0x7ff0000000000000});
    default: return 0;
  }
}

/// Of another program's checkpoint: the checksums of torch.save's archives are as saved, and all elements can
/// be read. Their places were checked when it was opened.
VerifyReport verify_foreign(const Checkpoint& checkpoint,
                            const std::function<void(int64_t, int64_t)>& progress) {
  VerifyReport report;
  report.num_files = static_cast<int64_t>(checkpoint.foreign()->files.size());
  report.by_file.emplace_back();
  const ForeignCheckpoint& foreign = *checkpoint.foreign();
  for (size_t i = 0; i < foreign.archives.size(); ++i) try {
      report.num_archives += check_archives(foreign, i, foreign.archives.size());
    } catch (const Error& error) {
      report.problems.emplace_back(error.what());
    }
  const FileRecord& file = checkpoint.manifest().files[0];
  std::vector<std::byte> buffer;
  for (const DatasetRecord& dataset : file.datasets) {
    ++report.num_blocks;
    try {
      constexpr int64_t kPiece = int64_t{8} << 20;
      for (int64_t begin = 0; begin < dataset.bytes; begin += kPiece) {
        buffer.resize(static_cast<size_t>(std::min(kPiece, dataset.bytes - begin)));
        checkpoint.read(0, dataset, begin, buffer);
        report.bytes += static_cast<int64_t>(buffer.size());
        report.num_nonfinite += num_nonfinite(buffer, dataset.type);
        if (progress) progress(report.bytes, file.bytes);
      }
    } catch (const Error& error) {
      report.problems.push_back(str(dataset.name, ": ", error.what()));
    }
  }
  if (!report.ok()) report.by_file[0] = report.problems[0];
  return report;
}

}  // namespace

VerifyReport verify(const Checkpoint& checkpoint, const std::function<void(int64_t, int64_t)>& progress) {
  if (checkpoint.foreign() != nullptr) return verify_foreign(checkpoint, progress);
  return Verifier(checkpoint, progress).run();
}

VerifyReport verify(const fs::path& directory, const std::string& tag,
                    const std::function<void(int64_t, int64_t)>& progress) {
  return verify(Checkpoint::open_damaged(directory, tag), progress);
}

}  // namespace tessera::checkpoint

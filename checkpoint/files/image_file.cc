#include "checkpoint/files/image_file.h"

#include <algorithm>
#include <utility>

#include "checkpoint/block_hashes.h"
#include "core/check.h"

namespace tessera::checkpoint {
namespace {

using Segment = std::pair<int64_t, SourceBytes>;  // offset, bytes

/// Keeps a segment's bytes in memory.
class Acquired {
 public:
  explicit Acquired(const SourceBytes& source) : bytes(source.acquire()), source_(source) {}
  ~Acquired() noexcept(false) { source_.release(); }
  Acquired(const Acquired&) = delete;
  const std::span<const std::byte> bytes;

 private:
  const SourceBytes& source_;
};

/// Metadata and data from the file's first byte to its last.
std::vector<Segment> segments_of(const Hdf5Image& image, std::span<const SourceBytes> data) {
  std::vector<Segment> segments;
  for (const Hdf5Image::Piece& piece : image.metadata)
    segments.emplace_back(piece.offset, std::as_bytes(std::span(piece.bytes)));
  for (size_t i = 0; i < data.size(); ++i)
    if (data[i].size > 0) segments.emplace_back(image.offsets[i], data[i]);
  std::sort(segments.begin(), segments.end(),
            [](const Segment& a, const Segment& b) { return a.first < b.first; });
  int64_t end = 0;
  for (const auto& [offset, bytes] : segments) {
    TESSERA_CHECK(offset == end, "the segments of an HDF5 file leave a hole at byte ", end);
    end += bytes.size;
  }
  TESSERA_CHECK(end == image.file_bytes);
  return segments;
}

}  // namespace

FileRecord write_image_file(const Disk& disk, const std::filesystem::path& path, const Hdf5Image& image,
                            std::span<const SourceBytes> data) {
  // The device writes while we hash, so the sync at the end takes a third less time.
  constexpr int64_t kStartSyncBytes = 8 * kBlockBytes;
  constexpr int64_t kReadBytes = 8 * kBlockBytes;
  TESSERA_CHECK(data.size() == image.offsets.size());
  OutputFile file = disk.create(path);
  file.reserve(image.file_bytes);
  BlockHasher hasher;
  int64_t started = 0;
  const auto put = [&](int64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto room = static_cast<size_t>(kBlockBytes - offset % kBlockBytes);
      const std::span<const std::byte> piece = bytes.first(std::min(bytes.size(), room));
      hasher.update(piece);
      file.write_at(offset, piece);
      offset += static_cast<int64_t>(piece.size());
      bytes = bytes.subspan(piece.size());
      if (offset - started < kStartSyncBytes) continue;
      file.start_sync(started, offset - started);
      started = offset;
    }
  };
  std::vector<std::byte> buffer;  // of sources that are read
  for (const auto& [begin, source] : segments_of(image, data)) {
    if (!source.read) {
      const Acquired acquired(source);
      put(begin, acquired.bytes);
      continue;
    }
    buffer.resize(static_cast<size_t>(kReadBytes));
    for (int64_t done = 0; done < source.size;) {
      const auto piece =
          std::span(buffer).first(static_cast<size_t>(std::min(kReadBytes, source.size - done)));
      source.read(done, piece);
      put(begin + done, piece);
      done += std::ssize(piece);
    }
  }
  file.close();
  return {.name = path.filename().string(),
          .bytes = image.file_bytes,
          .block_hashes = hasher.finish(),
          .datasets = {}};
}

}  // namespace tessera::checkpoint

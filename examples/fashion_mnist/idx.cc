#include "examples/fashion_mnist/idx.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <span>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/files/mapped_file.h"
#include "core/str.h"

namespace tessera::examples {
namespace {

constexpr size_t kBlock_bytes = 1 << 18;
constexpr int64_t kMaxValues = int64_t{1} << 32;  // 4 GiB, far more than any such data set
constexpr uint8_t kUnsignedByte = 0x08;

/// Reads the bytes of a file, decompressing it if it is gzip. Uses inflate() directly: zlib's gzFile ignores
/// damage after the compressed stream.
class ByteSource {
 public:
  explicit ByteSource(const std::string& path) try : path_(path), file_(path) {
    refill();
    gzip_ = stream_.avail_in >= 2 && stream_.next_in[0] == 0x1f && stream_.next_in[1] == 0x8b;
    if (gzip_ && inflateInit2(&stream_, 15 + 16) != Z_OK) throw DataError(path, ": zlib cannot start");
  } catch (const DiskError& error) {
    throw DataError(path, ": cannot be opened: ", error.reason(), "; expected an IDX file (plain or .gz)");
  }
  ~ByteSource() {
    if (gzip_) inflateEnd(&stream_);
  }
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  bool gzip() const { return gzip_; }

  /// Fills `buffer`; returns fewer bytes only at the end of the file.
  size_t read(uint8_t* buffer, size_t size) {
    return gzip_ ? read_gzip(buffer, size) : read_plain(buffer, size);
  }

 private:
  bool refill() {
    stream_.avail_in = static_cast<uInt>(file_.read_some(offset_, std::as_writable_bytes(std::span(block_))));
    stream_.next_in = block_.data();
    offset_ += stream_.avail_in;
    return stream_.avail_in > 0;
  }

  size_t read_plain(uint8_t* buffer, size_t size) {
    size_t done = 0;
    while (done < size && (stream_.avail_in > 0 || refill())) {
      const size_t part = std::min<size_t>(size - done, stream_.avail_in);
      std::memcpy(buffer + done, stream_.next_in, part);
      stream_.next_in += part;
      stream_.avail_in -= static_cast<uInt>(part);
      done += part;
    }
    return done;
  }

  size_t read_gzip(uint8_t* buffer, size_t size) {
    stream_.next_out = buffer;
    stream_.avail_out = static_cast<uInt>(size);
    while (stream_.avail_out > 0 && !finished_) {
      if (stream_.avail_in == 0 && !refill()) {
        throw DataError(path_, ": truncated: the gzip stream ends in the middle, after ", stream_.total_out,
                        " decompressed bytes");
      }
      const int status = inflate(&stream_, Z_NO_FLUSH);
      if (status == Z_STREAM_END) {
        finished_ = true;
        if (stream_.avail_in > 0 || refill()) {
          throw DataError(path_, ": damaged: there are bytes after the end of the gzip stream");
        }
      } else if (status != Z_OK && status != Z_BUF_ERROR) {
        throw DataError(path_, ": damaged: not a valid gzip stream (zlib: ",
                        stream_.msg != nullptr ? stream_.msg : "unknown error", ")");
      }
    }
    return size - stream_.avail_out;
  }

  std::string path_;
  InputFile file_;
  int64_t offset_ = 0;  // of the file's next block
  std::array<uint8_t, kBlock_bytes> block_;
  z_stream stream_{};
  bool gzip_ = false;
  bool finished_ = false;
};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t size : shape)
    text += (text.empty() ? "" : " x ") + (size == kAnySize ? "N" : std::to_string(size));
  return text;
}

/// Reads the header and returns its shape.
std::vector<int64_t> read_header(ByteSource& source, const std::string& path,
                                 const std::vector<int64_t>& expected) {
  const std::string wanted = str("expected an IDX file of unsigned bytes of shape ", shape_text(expected));
  std::array<uint8_t, 4> magic{};
  if (source.read(magic.data(), magic.size()) < magic.size()) {
    throw DataError(path, ": truncated: the file ends before its 4-byte IDX header; ", wanted);
  }
  if (magic[0] != 0 || magic[1] != 0 || magic[2] != kUnsignedByte || magic[3] != expected.size()) {
    throw DataError(path, ": another kind of file: it starts with ",
                    printed("0x%02x%02x%02x%02x", magic[0], magic[1], magic[2], magic[3]),
                    source.gzip() ? " (decompressed)" : "", ", not with ",
                    printed("0x0000%02x%02zx", kUnsignedByte, expected.size()), "; ", wanted);
  }
  std::vector<int64_t> shape;
  for (size_t i = 0; i < expected.size(); ++i) {
    std::array<uint8_t, 4> b{};
    if (source.read(b.data(), b.size()) < b.size()) {
      throw DataError(path, ": truncated: the file ends within its IDX header; ", wanted);
    }
    shape.push_back(int64_t{b[0]} << 24 | int64_t{b[1]} << 16 | int64_t{b[2]} << 8 | int64_t{b[3]});
  }
  return shape;
}

int64_t checked_numel(const std::string& path, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& expected) {
  int64_t numel = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (expected[i] != kAnySize && shape[i] != expected[i]) {
      throw DataError(path, ": wrong shape: found ", shape_text(shape), ", expected ", shape_text(expected));
    }
    if (shape[i] == 0 || shape[i] > kMaxValues / numel) {
      throw DataError(path, ": impossible shape in the header: ", shape_text(shape), ", expected ",
                      shape_text(expected), " with at least 1 and at most ", kMaxValues, " values");
    }
    numel *= shape[i];
  }
  return numel;
}

/// Reports "truncated" or "trailing bytes": `found` values instead of `numel`.
[[noreturn]] void fail_for_size(const std::string& path, const IdxArray& array, int64_t numel,
                                int64_t found) {
  throw DataError(path, found < numel ? ": truncated" : ": trailing bytes", ": the header says ",
                  shape_text(array.shape), ", expected ", numel, " bytes of values, found ",
                  found < numel ? std::to_string(found) : "more");
}

void map_values(const std::string& path, int64_t numel, IdxArray& array) {
  const auto file = std::make_shared<const MappedFile>(path);
  const int64_t header_bytes = 4 + 4 * static_cast<int64_t>(array.shape.size());
  if (file->bytes() - header_bytes != numel) fail_for_size(path, array, numel, file->bytes() - header_bytes);
  array.values = {reinterpret_cast<const uint8_t*>(file->data()) + header_bytes, static_cast<size_t>(numel)};
  array.storage = file;
}

void read_values(ByteSource& source, const std::string& path, int64_t numel, IdxArray& array) {
  const auto values = std::make_shared<std::vector<uint8_t>>();
  while (static_cast<int64_t>(values->size()) < numel) {
    const size_t begin = values->size();
    const size_t part = std::min(static_cast<size_t>(numel) - begin, kBlock_bytes);
    values->resize(begin + part);
    const size_t found = source.read(values->data() + begin, part);
    if (found < part) fail_for_size(path, array, numel, static_cast<int64_t>(begin + found));
  }
  uint8_t extra = 0;
  if (source.read(&extra, 1) != 0) fail_for_size(path, array, numel, numel + 1);
  array.values = *values;
  array.storage = values;
}

}  // namespace

IdxArray read_idx(const std::string& path, const std::vector<int64_t>& expected_shape) {
  ByteSource source(path);
  IdxArray array;
  array.shape = read_header(source, path, expected_shape);
  const int64_t numel = checked_numel(path, array.shape, expected_shape);
  if (!source.gzip()) {
    map_values(path, numel, array);
  } else {
    read_values(source, path, numel, array);
  }
  return array;
}

}  // namespace tessera::examples

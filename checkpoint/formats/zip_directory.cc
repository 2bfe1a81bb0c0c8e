// The format is PKWARE's APPNOTE.TXT 6.3.10. An archive says three times where an entry is: in the directory
// at its end, in the header before the entry, and in a descriptor behind it. Readers that believe different
// ones read different files in one archive, so the first two must agree.
#include "checkpoint/formats/zip_directory.h"

#include <zlib.h>

#include <algorithm>
#include <string_view>

#include "checkpoint/checkpoint_error.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

using std::string_view;

/// Little-endian numbers one after the other.
class ZipNumbers {
 public:
  explicit ZipNumbers(string_view text) : text_(text) {}
  uint64_t take(size_t bytes) {
    uint64_t value = 0;
    for (size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<uint8_t>(text_[i]);
    text_.remove_prefix(bytes);
    return value;
  }
  void skip(size_t bytes) { text_.remove_prefix(bytes); }

 private:
  string_view text_;
};

struct Directory {
  int64_t offset = 0, bytes = 0;
  uint64_t entries = 0;
};

class ZipReader {
 public:
  ZipReader(int64_t file_bytes, const ReadBytes& read, const std::string& source)
      : file_bytes_(file_bytes), read_(read), source_(source) {}

  std::vector<ZipEntry> read() {
    const Directory directory = find_directory();
    if (directory.bytes > kMaxDirectoryBytes)
      fail("its directory has ", directory.bytes, " bytes; expected at most ", kMaxDirectoryBytes);
    if (directory.bytes > 0 && !has(directory.offset, "PK\1\2")) fail("its directory is none");
    std::vector<ZipEntry> entries;
    const std::string text = read_(directory.offset, directory.bytes);
    string_view rest = text;
    while (!rest.empty()) entries.push_back(read_entry(rest, directory.offset));
    if (entries.size() != directory.entries)
      fail("the directory has ", entries.size(), " entries, and the archive's end says ", directory.entries);
    check_places(entries);
    return entries;
  }

 private:
  static constexpr int64_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56, kLocalBytes = 30,
                           kCentralBytes = 46, kMaxDirectoryBytes = int64_t{1} << 28;
  static constexpr uint64_t kElsewhere16 = 0xffff,
                            kElsewhere32 = 0xffffffff;  // the number is in a zip64 field
  static constexpr uint16_t kZip64Field = 1;
  static constexpr uint64_t kEncrypted = 1, kHasDescriptor = 1 << 3, kUtf8Name = 1 << 11;

  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    throw CheckpointError(source_, ": the zip archive is damaged: ", args...);
  }

  bool has(int64_t offset, string_view signature) const {
    const auto bytes = static_cast<int64_t>(signature.size());
    return offset >= 0 && offset <= file_bytes_ - bytes && read_(offset, bytes) == signature;
  }

  Directory find_directory() const {
    const int64_t end = file_bytes_ - kEndBytes;
    if (!has(end, "PK\5\6")) {
      const int64_t tail = std::min<int64_t>(file_bytes_, 70'000);
      const size_t last = read_(file_bytes_ - tail, tail).rfind("PK\5\6");
      if (last == string_view::npos) fail("it has no directory at its end; the file is cut off");
      const int64_t left = tail - static_cast<int64_t>(last);
      fail("its end is at byte ", file_bytes_ - left, ", and ", left, " bytes are left from there; expected ",
           kEndBytes);
    }
    const std::string text = read_(end, kEndBytes);
    ZipNumbers fields(text);
    fields.skip(4);
    const uint64_t disk = fields.take(2), first_disk = fields.take(2), on_disk = fields.take(2),
                   entries = fields.take(2), bytes = fields.take(4), offset = fields.take(4),
                   comment = fields.take(2);
    if (comment != 0) fail("its end has a comment of ", comment, " bytes, which is not there");
    if (disk != 0 || first_disk != 0 || on_disk != entries) fail("it is a part of several");
    Directory directory{static_cast<int64_t>(offset), static_cast<int64_t>(bytes), entries};
    int64_t directory_end = end;
    if (has(end - kLocatorBytes, "PK\6\7")) {
      directory_end = end - kLocatorBytes - kEnd64Bytes;
      directory = read_end64(directory_end, end - kLocatorBytes);
      const auto agrees = [](uint64_t here, uint64_t elsewhere, uint64_t there) {
        return here == elsewhere || here == there;
      };
      if (!agrees(entries, kElsewhere16, directory.entries) ||
          !agrees(bytes, kElsewhere32, static_cast<uint64_t>(directory.bytes)) ||
          !agrees(offset, kElsewhere32, static_cast<uint64_t>(directory.offset)))
        fail("its two ends contradict each other");
    }
    if (directory.offset < 0 || directory.bytes < 0 || directory.offset > directory_end ||
        directory.bytes != directory_end - directory.offset)
      fail("its directory has ", directory.bytes, " bytes at byte ", directory.offset,
           "; expected to end at byte ", directory_end);
    return directory;
  }

  Directory read_end64(int64_t at, int64_t locator) const {
    const std::string locator_text = read_(locator, kLocatorBytes);
    ZipNumbers place(locator_text);
    place.skip(4 + 4);
    if (!has(at, "PK\6\6") || place.take(8) != static_cast<uint64_t>(at) || place.take(4) > 1)
      fail("its zip64 end is not at byte ", at);
    const std::string text = read_(at, kEnd64Bytes);
    ZipNumbers fields(text);
    fields.skip(4);
    const uint64_t record = fields.take(8);
    fields.skip(2 + 2);
    const uint64_t disk = fields.take(4), first_disk = fields.take(4), on_disk = fields.take(8),
                   entries = fields.take(8), bytes = fields.take(8), offset = fields.take(8);
    if (record != kEnd64Bytes - 12 || disk != 0 || first_disk != 0 || on_disk != entries)
      fail("its zip64 end is none");
    return {static_cast<int64_t>(offset), static_cast<int64_t>(bytes), entries};
  }

  /// Replaces numbers that are elsewhere by those of the zip64 field among the `extra` ones.
  void take_zip64(string_view extra, const std::string& name,
                  std::initializer_list<uint64_t*> numbers) const {
    bool found = false;
    while (extra.size() >= 4) {
      ZipNumbers head(extra);
      const uint64_t id = head.take(2), bytes = head.take(2);
      if (bytes > extra.size() - 4) fail("entry ", quoted_name(name), " has a field that ends outside");
      ZipNumbers fields(extra.substr(4, bytes));
      extra.remove_prefix(4 + bytes);
      if (id != kZip64Field) continue;
      if (found) fail("entry ", quoted_name(name), " has two zip64 fields");
      found = true;
      size_t left = bytes;
      for (uint64_t* number : numbers) {
        if (*number != kElsewhere32) continue;
        if (left < 8) fail("entry ", quoted_name(name), " has a zip64 field that ends early");
        *number = fields.take(8);
        left -= 8;
      }
    }
  }

  ZipEntry read_entry(string_view& rest, int64_t data_end) const {
    if (rest.size() < kCentralBytes || !rest.starts_with("PK\1\2"))
      fail("its directory ends early, or is none");
    ZipNumbers fields(rest);
    fields.skip(4 + 2 + 2);
    const uint64_t flags = fields.take(2), method = fields.take(2);
    fields.skip(4);
    const uint64_t crc = fields.take(4);
    uint64_t packed = fields.take(4), bytes = fields.take(4);
    const uint64_t name_bytes = fields.take(2), extra_bytes = fields.take(2), comment_bytes = fields.take(2),
                   disk = fields.take(2);
    fields.skip(2 + 4);
    uint64_t offset = fields.take(4);
    if (name_bytes + extra_bytes + comment_bytes > rest.size() - kCentralBytes)
      fail("its directory ends early");
    ZipEntry entry;
    entry.name = rest.substr(kCentralBytes, name_bytes);
    check_name(entry.name);
    const string_view extra = rest.substr(kCentralBytes + name_bytes, extra_bytes);
    rest.remove_prefix(kCentralBytes + name_bytes + extra_bytes + comment_bytes);
    take_zip64(extra, entry.name, {&bytes, &packed, &offset});
    check_flags(entry.name, flags, method);
    if (disk != 0) fail("entry ", quoted_name(entry.name), " is in another file");
    if (method == 0 && packed != bytes)
      fail("entry ", quoted_name(entry.name), " has ", packed, " bytes for ", bytes);
    const auto end = static_cast<uint64_t>(data_end);
    if (offset > end || end - offset < kLocalBytes || packed > end - offset - kLocalBytes)
      fail("entry ", quoted_name(entry.name), " of ", packed, " bytes at byte ", offset,
           " lies outside of the first ", end, ", where entries are");
    entry.header_offset = static_cast<int64_t>(offset);
    entry.bytes = static_cast<int64_t>(packed);
    entry.method = static_cast<int>(method);
    entry.crc = static_cast<uint32_t>(crc);
    read_local(entry, flags, bytes, data_end);
    return entry;
  }

  void check_name(const std::string& name) const {
    const bool has_control = std::any_of(name.begin(), name.end(), [](char c) { return c >= 0 && c < ' '; });
    if (name.empty() || has_control || !is_utf8(name)) fail("an entry has the name ", quoted_name(name));
    if (name[0] == '/' || name.find('\\') != std::string::npos || name.find(':') != std::string::npos ||
        str("/", name, "/").find("/../") != std::string::npos)
      throw CheckpointError(source_, ": entry ", quoted_name(name), " of the zip archive leads out of it");
  }

  void check_flags(const std::string& name, uint64_t flags, uint64_t method) const {
    if ((flags & kEncrypted) != 0)
      throw CheckpointError(source_, ": entry ", quoted_name(name), " of the zip archive is encrypted");
    if (method == 0 && (flags & ~(kHasDescriptor | kUtf8Name)) != 0)
      fail("entry ", quoted_name(name), " has the flags ", flags);
  }

  /// Compares the entry's own header with the directory, and finds its data.
  void read_local(ZipEntry& entry, uint64_t flags, uint64_t unpacked, int64_t data_end) const {
    const int64_t at = entry.header_offset;
    if (!has(at, "PK\3\4")) fail("entry ", quoted_name(entry.name), " has no header at byte ", at);
    const std::string header = read_(at, kLocalBytes);
    ZipNumbers fields(header);
    fields.skip(4 + 2);
    const uint64_t local_flags = fields.take(2), method = fields.take(2);
    fields.skip(4);
    const uint64_t crc = fields.take(4);
    uint64_t packed = fields.take(4), bytes = fields.take(4);
    const uint64_t name_bytes = fields.take(2), extra_bytes = fields.take(2);
    const auto left = static_cast<uint64_t>(data_end - entry.header_offset - kLocalBytes);
    if (name_bytes + extra_bytes > left ||
        static_cast<uint64_t>(entry.bytes) > left - name_bytes - extra_bytes)
      fail("entry ", quoted_name(entry.name), " of ", entry.bytes, " bytes at byte ", at, " lies outside");
    const std::string text = read_(at + kLocalBytes, static_cast<int64_t>(name_bytes + extra_bytes));
    const string_view name = string_view(text).substr(0, name_bytes);
    if (name != entry.name)
      fail("entry ", quoted_name(entry.name), " has the name ", quoted_name(name), " in its own header");
    check_flags(entry.name, local_flags, method);
    if (method != static_cast<uint64_t>(entry.method))
      fail("entry ", quoted_name(entry.name), " is compressed in two ways: ", method, " and ", entry.method);
    take_zip64(string_view(text).substr(name_bytes), entry.name, {&bytes, &packed});
    // With a descriptor, the header may leave the numbers out.
    const bool may_be_left_out = ((flags | local_flags) & kHasDescriptor) != 0;
    const auto agrees = [&](uint64_t here, uint64_t there) {
      return here == there || (may_be_left_out && (here == 0 || here == kElsewhere32));
    };
    const auto size = static_cast<uint64_t>(entry.bytes);
    if (!agrees(bytes, unpacked) || !agrees(packed, size) || !agrees(crc, entry.crc))
      fail("entry ", quoted_name(entry.name), " has ", bytes, " bytes in its own header, and ", size,
           " in the directory");
    entry.offset = entry.header_offset + kLocalBytes + static_cast<int64_t>(name_bytes + extra_bytes);
  }

  void check_places(std::vector<ZipEntry>& entries) const {
    std::sort(entries.begin(), entries.end(),
              [](const ZipEntry& a, const ZipEntry& b) { return a.name < b.name; });
    for (size_t i = 1; i < entries.size(); ++i)
      if (entries[i].name == entries[i - 1].name)
        throw CheckpointError(source_, ": the zip archive has entry ", quoted_name(entries[i].name),
                              " twice; expected each name once");
    std::sort(entries.begin(), entries.end(),
              [](const ZipEntry& a, const ZipEntry& b) { return a.header_offset < b.header_offset; });
    for (size_t i = 1; i < entries.size(); ++i)
      if (entries[i].header_offset < entries[i - 1].offset + entries[i - 1].bytes)
        fail("entries ", quoted_name(entries[i - 1].name), " and ", quoted_name(entries[i].name), " overlap");
  }

  int64_t file_bytes_;
  const ReadBytes& read_;
  const std::string& source_;
};

}  // namespace

std::vector<ZipEntry> read_zip_directory(int64_t file_bytes, const ReadBytes& read,
                                         const std::string& source) {
  return ZipReader(file_bytes, read, source).read();
}

void check_zip_entry(const ReadBytes& read, const ZipEntry& entry, const std::string& source) {
  constexpr int64_t kPieceBytes = int64_t{1} << 20;
  uint32_t found = 0;
  for (int64_t done = 0; done < entry.bytes; done += kPieceBytes) {
    const std::string piece = read(entry.offset + done, std::min(kPieceBytes, entry.bytes - done));
    found = static_cast<uint32_t>(
        ::crc32_z(found, reinterpret_cast<const unsigned char*>(piece.data()), piece.size()));
  }
  if (found != entry.crc)
    throw CheckpointError(source, ": entry ", quoted_name(entry.name), " is damaged: its CRC-32 is ", found,
                          "; expected ", entry.crc);
}

}  // namespace tessera::checkpoint

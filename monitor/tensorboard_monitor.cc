#include "monitor/tensorboard_monitor.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "core/host_name.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "monitor/wall_time.h"

namespace tessera {
namespace {

enum WireType { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

template <class T>
std::string little_endian(T value) {
  std::string out;
  for (size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(value >> (8 * i));
  return out;
}

}  // namespace

/// Encodes a protocol buffer message field by field (protobuf.dev/programming-guides/encoding). A value.
class ProtoMessage {
 public:
  ProtoMessage& integer(int field, int64_t value) {
    key(field, kVarint);
    varint(static_cast<uint64_t>(value));
    return *this;
  }
  ProtoMessage& real32(int field, float value) {
    key(field, kFixed32);
    data_ += little_endian(std::bit_cast<uint32_t>(value));
    return *this;
  }
  ProtoMessage& real64(int field, double value) {
    key(field, kFixed64);
    data_ += little_endian(std::bit_cast<uint64_t>(value));
    return *this;
  }
  /// Repeated, packed.
  ProtoMessage& real64s(int field, std::span<const double> values) {
    std::string packed;
    for (double value : values) packed += little_endian(std::bit_cast<uint64_t>(value));
    return bytes(field, packed);
  }
  /// Bytes and strings.
  ProtoMessage& bytes(int field, std::string_view value) {
    key(field, kLength);
    varint(value.size());
    data_ += value;
    return *this;
  }
  ProtoMessage& message(int field, const ProtoMessage& value) { return bytes(field, value.data_); }
  const std::string& data() const { return data_; }

 private:
  void key(int field, WireType type) { varint(static_cast<uint64_t>(field) << 3 | type); }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) data_ += static_cast<char>(value | 0x80);
    data_ += static_cast<char>(value);
  }

  std::string data_;
};

namespace {

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}

/// CRC-32C (Castagnoli; RFC 3720), with the mask of TFRecord.
uint32_t masked_crc32c(std::string_view data) {
  static constexpr std::array<uint32_t, 256> table = make_crc_table();
  uint32_t crc = ~0u;
  for (char c : data) crc = (crc >> 8) ^ table[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;  // so that a CRC over bytes that hold a CRC stays one
}

std::string file_name() {
  static std::atomic<int> number{0};  // two files of one process in one second
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%010lld", static_cast<long long>(wall_time_s()));
  return str("events.out.tfevents.", seconds, ".", host_name(), ".", getpid(), ".", number++);
}

std::filesystem::path new_file(const Disk& disk, const std::filesystem::path& folder) {
  disk.create_directories(folder);
  return folder / file_name();
}

// Field numbers of tensorboard/compat/proto: event.proto, summary.proto, histogram.proto, tensor.proto.
constexpr int kEventTime = 1, kEventStep = 2, kEventVersion = 3, kEventSummary = 5, kEventSessionLog = 7;
constexpr int kSessionStatus = 1, kSessionStart = 1;
constexpr int kSummaryValue = 1;
namespace value {
constexpr int kTag = 1, kSimpleValue = 2, kImage = 4, kHistogram = 5, kTensor = 8, kMetadata = 9;
}

/// A Summary with one more value.
void add(ProtoMessage& summary, const std::string& tag, ProtoMessage content) {
  summary.message(kSummaryValue, content.bytes(value::kTag, tag));
}

ProtoMessage event() { return ProtoMessage().real64(kEventTime, wall_time_s()); }

ProtoMessage histogram_proto(const Histogram& histogram) {
  return ProtoMessage()
      .real64(1, histogram.min)
      .real64(2, histogram.max)
      .real64(3, histogram.num)
      .real64(4, histogram.sum)
      .real64(5, histogram.sum_squares)
      .real64s(6, histogram.bucket_limit)
      .real64s(7, histogram.bucket);
}

ProtoMessage image_proto(const PngView& png) {
  return ProtoMessage()
      .integer(1, png.height)
      .integer(2, png.width)
      .integer(3, png.channels)
      .bytes(4, png.bytes);
}

/// TensorBoard shows text as Markdown: this is what shows it as it is.
std::string fenced(const std::string& language, const std::string& text) {
  size_t longest = 2, length = 0;
  for (const char c : text) longest = std::max(longest, length = c == '`' ? length + 1 : 0);
  const std::string fence(longest + 1, '`');
  return str(fence, language, "\n", text, "\n", fence);
}

/// A tensor of one string, and the metadata that has it shown by TensorBoard's text plugin.
ProtoMessage text_value(const std::string& text) {
  constexpr int kTypeString = 7;
  const ProtoMessage shape = ProtoMessage().message(2, ProtoMessage().integer(1, 1));
  const ProtoMessage plugin = ProtoMessage().bytes(1, "text");
  return ProtoMessage()
      .message(value::kTensor, ProtoMessage().integer(1, kTypeString).message(2, shape).bytes(8, text))
      .message(value::kMetadata, ProtoMessage().message(1, plugin));
}

}  // namespace

TensorboardMonitor::TensorboardMonitor(const std::filesystem::path& folder,
                                       std::optional<int64_t> resumed_after)
    : first_step_(resumed_after ? *resumed_after + 1 : 0), file_(disk_.create(new_file(disk_, folder))) {
  append(event().bytes(kEventVersion, "brain.Event:2"));
  write(first_step_, kEventSessionLog, ProtoMessage().integer(kSessionStatus, kSessionStart));
}

void TensorboardMonitor::write(int64_t step, int field, const ProtoMessage& what) {
  append(event().integer(kEventStep, step).message(field, what));
}

void TensorboardMonitor::write_value(int64_t step, const std::string& tag, ProtoMessage content) {
  ProtoMessage summary;
  add(summary, tag, std::move(content));
  write(step, kEventSummary, summary);
}

// A frame of a TFRecord file: length, CRC of the length, data, CRC of the data.
void TensorboardMonitor::append(const ProtoMessage& event) {
  const std::string length = little_endian(static_cast<uint64_t>(event.data().size()));
  file_.append(length + little_endian(masked_crc32c(length)) + event.data() +
               little_endian(masked_crc32c(event.data())));
}

void TensorboardMonitor::scalars(int64_t step, const Scalars& scalars) {
  ProtoMessage summary;
  for (const auto& [name, number] : scalars)
    add(summary, name, ProtoMessage().real32(value::kSimpleValue, static_cast<float>(number)));
  write(step, kEventSummary, summary);
}

void TensorboardMonitor::histogram(const std::string& name, int64_t step, const Histogram& histogram) {
  write_value(step, name, ProtoMessage().message(value::kHistogram, histogram_proto(histogram)));
}

void TensorboardMonitor::image(const std::string& name, int64_t step, const PngView& png) {
  write_value(step, name, ProtoMessage().message(value::kImage, image_proto(png)));
}

// Named as a SummaryWriter's add_text does.
void TensorboardMonitor::text(const std::string& name, int64_t step, const std::string& text) {
  write_value(step, name + "/text_summary", text_value(fenced("", text)));
}

void TensorboardMonitor::params(const nlohmann::ordered_json& params) {
  write_value(first_step_, "params/text_summary", text_value(fenced("json", json_text(params, 2))));
}

}  // namespace tessera

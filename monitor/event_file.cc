#include "monitor/event_file.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdio>

#include "core/host_name.h"
#include "core/str.h"
#include "monitor/wall_time.h"

namespace tessera {
namespace {

// tensorflow/core/util/event.proto
constexpr int kWallTime = 1, kStep = 2, kFileVersion = 3;

enum WireType { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

template <class T>
std::string little_endian(T value) {
  std::string out;
  for (size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(value >> (8 * i));
  return out;
}

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
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

}  // namespace

void ProtoMessage::varint(uint64_t value) {
  for (; value >= 0x80; value >>= 7) data_ += static_cast<char>(value | 0x80);
  data_ += static_cast<char>(value);
}

ProtoMessage& ProtoMessage::integer(int field, int64_t value) {
  varint(static_cast<uint64_t>(field) << 3 | kVarint);
  varint(static_cast<uint64_t>(value));
  return *this;
}

ProtoMessage& ProtoMessage::real32(int field, float value) {
  varint(static_cast<uint64_t>(field) << 3 | kFixed32);
  data_ += little_endian(std::bit_cast<uint32_t>(value));
  return *this;
}

ProtoMessage& ProtoMessage::real64(int field, double value) {
  varint(static_cast<uint64_t>(field) << 3 | kFixed64);
  data_ += little_endian(std::bit_cast<uint64_t>(value));
  return *this;
}

ProtoMessage& ProtoMessage::real64s(int field, std::span<const double> values) {
  std::string packed;
  for (double value : values) packed += little_endian(std::bit_cast<uint64_t>(value));
  return bytes(field, packed);
}

ProtoMessage& ProtoMessage::bytes(int field, std::string_view value) {
  varint(static_cast<uint64_t>(field) << 3 | kLength);
  varint(value.size());
  data_ += value;
  return *this;
}

uint32_t masked_crc32c(std::string_view data) {
  static constexpr std::array<uint32_t, 256> table = make_crc_table();
  uint32_t crc = ~0u;
  for (char c : data) crc = (crc >> 8) ^ table[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;  // so that a CRC over bytes that hold a CRC stays one
}

EventFile::EventFile(const std::filesystem::path& folder) : file_(disk_.create(new_file(disk_, folder))) {
  write_event(ProtoMessage().real64(kWallTime, wall_time_s()).bytes(kFileVersion, "brain.Event:2"));
}

void EventFile::write(int64_t step, int field, const ProtoMessage& what) {
  write_event(ProtoMessage().real64(kWallTime, wall_time_s()).integer(kStep, step).message(field, what));
}

// A frame: length, CRC of the length, data, CRC of the data.
void EventFile::write_event(const ProtoMessage& event) {
  const std::string length = little_endian(static_cast<uint64_t>(event.data().size()));
  file_.append(length + little_endian(masked_crc32c(length)) + event.data() +
               little_endian(masked_crc32c(event.data())));
}

}  // namespace tessera

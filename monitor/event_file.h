// EventFile: a file for TensorBoard. Protocol buffers (tensorflow.Event) in the frames of a TFRecord file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "core/files/disk.h"

namespace tessera {

/// Encodes a protocol buffer message field by field (protobuf.dev/programming-guides/encoding). A value.
class ProtoMessage {
 public:
  ProtoMessage& integer(int field, int64_t value);
  ProtoMessage& real32(int field, float value);
  ProtoMessage& real64(int field, double value);
  ProtoMessage& real64s(int field, std::span<const double> values);  ///< repeated, packed
  ProtoMessage& bytes(int field, std::string_view value);            ///< bytes and strings
  ProtoMessage& message(int field, const ProtoMessage& value) { return bytes(field, value.data()); }
  const std::string& data() const { return data_; }

 private:
  void varint(uint64_t value);
  std::string data_;
};

/// CRC-32C (Castagnoli; RFC 3720), with the mask of TFRecord.
uint32_t masked_crc32c(std::string_view data);

/// Appends events to one file of TensorBoard's: FOLDER/events.out.tfevents.TIME.HOST.PID.NUMBER. Owns the
/// open file. Not thread-safe. Members throw DiskError.
class EventFile {
 public:
  /// Creates a new file, which begins with its version.
  explicit EventFile(const std::filesystem::path& folder);

  /// Appends a tensorflow.Event with the current time: `what` is its field `field` (5: Summary, 7:
  /// SessionLog). It is written at once, so that TensorBoard sees it, and it stays when the run is killed.
  void write(int64_t step, int field, const ProtoMessage& what);

 private:
  void write_event(const ProtoMessage& event);

  Disk disk_{DiskOptions{.sync = false, .probe = {}}};
  OutputFile file_;
};

}  // namespace tessera

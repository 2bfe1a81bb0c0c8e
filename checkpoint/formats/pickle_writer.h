// PickleWriter: writes values as Python's pickle does, for files that torch.load and pickle.load read.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace tessera::checkpoint {

/// Writes one pickle of protocol 2, front to back: each call writes a value, and a container takes the values
/// between its begin and its end.
///
///   PickleWriter pickle;
///   pickle.begin_dict().text("lr").number(1e-3).text("betas").begin_tuple().number(0.9).number(0.95).end_tuple();
///   file.append(pickle.end_dict().finish());
///
/// Nothing is memoized: a reader needs no memo, and the tables that we write are small. Not thread-safe.
class PickleWriter {
 public:
  PickleWriter() { op("\x80\x02"); }  // PROTO

  PickleWriter& none() { return op("N"); }
  PickleWriter& boolean(bool value) { return op(value ? "\x88" : "\x89"); }
  PickleWriter& integer(int64_t value);
  /// A float, also one that is not finite.
  PickleWriter& number(double value);
  /// UTF-8.
  PickleWriter& text(std::string_view value);
  /// A class or function: ("torch", "float32").
  PickleWriter& global(std::string_view module, std::string_view name);
  /// torch.float32, torch.int64, …
  PickleWriter& dtype(DType type);

  PickleWriter& begin_list() { return op("]("); }
  PickleWriter& end_list() { return op("e"); }
  PickleWriter& begin_tuple() { return op("("); }
  PickleWriter& end_tuple() { return op("t"); }
  /// Keys and values in turn.
  PickleWriter& begin_dict() { return op("}("); }
  PickleWriter& begin_ordered_dict() { return ordered_dict().op("("); }
  PickleWriter& end_dict() { return op("u"); }
  PickleWriter& ordered_dict() { return global("collections", "OrderedDict").op(")R"); }

  PickleWriter& tuple(std::span<const int64_t> values);
  /// torch.Size.
  PickleWriter& size(std::span<const int64_t> values);

  /// Calls what was written before the tuple that was written last.
  PickleWriter& call() { return op("R"); }
  /// An object of a class, made without its constructor. `state` follows: the dict of its attributes, or what
  /// its __setstate__ takes; then set_state().
  PickleWriter& object(std::string_view module, std::string_view name) {
    return global(module, name).op(")\x81");
  }
  PickleWriter& set_state() { return op("b"); }

  /// A tensor, contiguous, that is all of the archive's storage of this number.
  PickleWriter& tensor(DType type, const std::vector<int64_t>& shape, size_t storage);

  /// The pickle. Call it once.
  std::string finish() { return std::move(op(".").bytes_); }

 private:
  PickleWriter& op(std::string_view opcode) {
    bytes_ += opcode;
    return *this;
  }
  PickleWriter& little_endian(uint64_t value, int num_bytes);

  std::string bytes_;
};

}  // namespace tessera::checkpoint

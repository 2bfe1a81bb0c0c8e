// History: the collectives a rank has issued on a group, so that ranks which got stuck can compare notes
// and say which of them went another way, or stayed behind.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::comm {

/// One collective, described by what must be equal on all ranks.
struct Call {
  std::string op;     ///< "all_gather", "reduce_scatter", "exchange" …
  std::string label;  ///< the buffer's name; control characters become spaces
  std::string dtype;  ///< empty where there is no buffer
  int64_t numel = 0;

  bool operator==(const Call&) const = default;
  /// Local. `all_reduce of "unit 3" (1024 x Float)`
  std::string text() const;
  /// Local. 16 bits that differ, but for one pair in 65536, between different calls.
  uint32_t fingerprint() const;
};

/// The last kWindow calls, numbered from 1 in the order of issue. A plain value.
class History {
 public:
  static constexpr size_t kWindow = 64;

  /// Local. Returns the call's number.
  int64_t record(Call call);
  int64_t issued() const { return issued_; }
  /// Local. Null when `number` was never issued or is no longer remembered.
  const Call* find(int64_t number) const;

  std::string encode() const;
  /// Local. The inverse of encode(). Throws CommError on anything else.
  static History decode(std::string_view text);

 private:
  int64_t issued_ = 0;
  std::deque<Call> calls_;  ///< numbers issued_ - size + 1 … issued_
};

/// Local. The first number both remember and at which they differ.
std::optional<int64_t> first_difference(const History& a, const History& b);

}  // namespace tessera::comm

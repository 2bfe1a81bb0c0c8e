// What the ranks of a failed collective know about each other, and one line that names who is to blame. Plain
// values and text, so that every case can be tested without a network.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// The text with spaces for its control characters, which separate what is encoded here.
std::string without_controls(std::string text);

/// Describes a collective by what must be equal on all ranks.
struct CollectiveDesc {
  std::string op;     ///< "all_gather", "reduce_scatter", "exchange" …
  std::string label;  ///< the buffer's name
  std::string dtype;  ///< empty where there is no buffer
  int64_t numel = 0;

  bool operator==(const CollectiveDesc&) const = default;
  /// `all_reduce of "unit 3" (1024 x Float)`
  std::string text() const;
  /// 16 bits. Two different descriptions have the same ones by chance, once in 65536.
  uint32_t fingerprint() const;
};

/// Says how a rank's collective ended.
enum class Fault {
  kNone,     ///< it has not failed
  kTimeout,  ///< it waited for the whole timeout
  kClosed,   ///< a connection broke
};

/// Has what is known of one rank. All but `left` is what the rank itself publishes when a collective fails or
/// takes long.
struct RankReport {
  static constexpr size_t kWindow = 64;

  Fault fault = Fault::kNone;
  std::chrono::milliseconds waited{0};  ///< how long its collective was in flight when it failed
  int64_t num_issued = 0;               ///< collectives of this group
  std::deque<CollectiveDesc> recent;    ///< the last kWindow of them; the newest is number num_issued
  std::string left;                     ///< why it left the group; empty: it has not

  /// Adds a collective; control characters in its label become spaces. Returns its number, from 1 on.
  int64_t record(CollectiveDesc desc);
  /// Null when `number` was never issued or is no longer among the recent ones.
  const CollectiveDesc* find(int64_t number) const;

  std::string encode() const;
  /// The inverse of encode(); removes what it has read from the front. Throws CommError on anything
  /// else.
  static RankReport decode(std::string_view& text);
};

/// The reports of all ranks, in which what ranks have issued alike stands once.
std::string pack_reports(const std::vector<RankReport>& reports);
/// The inverse. Throws CommError on anything else than those of `size` ranks.
std::vector<RankReport> unpack_reports(std::string_view packed, int size);

/// Serves decoding: removes the text up to `separator` from the front and returns it. Throws CommError.
std::string_view take(std::string_view& text, char separator);
int64_t parse_integer(std::string_view text);

/// The first number that both remember with different descriptions.
std::optional<int64_t> first_difference(const RankReport& a, const RankReport& b);
/// `collective 8 differs between ranks: rank 0 issued all_reduce of …, rank 1 issued barrier of …`
std::string describe_difference(int64_t number, int rank_a, const RankReport& a, int rank_b,
                                const RankReport& b);

struct Failure {
  int rank = 0;                          ///< the one that asks
  int64_t number = 0;                    ///< the collective that failed on it
  std::string cause;                     ///< the backend's message, for when no rank can be blamed
  std::chrono::milliseconds timeout{0};  ///< how long ranks wait for each other
  std::vector<RankReport> reports;       ///< one a rank, the asking one's included
  std::vector<int> missing;              ///< ranks known not to have arrived (exchange)
  std::vector<int> gone;                 ///< ranks whose processes are known to have ended (liveness.h)
  std::vector<int> silent = {};          ///< of these the ones whose hosts do not answer
  std::vector<int> names = {};           ///< by rank: what it is called; empty: the same number

  int name(int r) const { return names.empty() ? r : names[static_cast<size_t>(r)]; }
};

/// `all_reduce of "unit 3" (8 x Float), collective 17: ranks 1 and 2 have not arrived within 2 s`
std::string diagnose(const Failure& failure);
/// Whether another rank has ended or left, and so is the cause.
bool is_of_peer(const Failure& failure);

}  // namespace tessera::comm

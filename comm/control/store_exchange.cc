#include "comm/control/store_exchange.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "comm/control/error_message.h"
#include "core/parse_number.h"
#include "core/peer_failure.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostBytes = int64_t{4} << 20;  // of all ranks' pieces together

/// Stands in place of the packed values where a rank has given up.
constexpr std::string_view kGivenUp = "given up: ";  // and why; values begin with a number

std::string value_key(int rank) { return str("value/", rank); }
std::string result_key(int64_t round) { return str("result/", round); }

/// Removes the number in the first line, and its line break, from the front.
int64_t take_line(std::string_view& text) {
  const std::optional<int64_t> number = take_number<int64_t>(text);
  if (!number || *number < 0 || !text.starts_with('\n'))
    throw CommError("what the store has of an exchange cannot be read");
  text.remove_prefix(1);
  return *number;
}

std::string pack(const std::vector<std::string>& values) {
  std::string packed;
  for (const std::string& value : values) packed += str(value.size(), '\n', value);
  return packed;
}

std::vector<std::string> unpack(std::string_view packed, int size, int64_t round) {
  std::vector<std::string> values;
  for (int rank = 0; rank < size; ++rank) {
    const auto bytes = static_cast<size_t>(take_line(packed));
    std::string_view value = packed.substr(0, bytes);
    packed.remove_prefix(value.size());
    if (take_line(value) != round) throw removed_from_store(result_key(round));  // passed on too late
    values.emplace_back(value);
  }
  return values;
}

}  // namespace

void StoreExchange::Result::fail(const std::string& message) const {
  if (of_peer) throw PeerFailure(message);
  throw CommError(message);
}

StoreExchange::Result StoreExchange::run(const std::string& value, std::chrono::milliseconds timeout,
                                         const std::function<void()>& watch) {
  const auto piece_bytes = static_cast<size_t>(std::max<int64_t>(kMostBytes / size_, 1));
  Result result = run_piece(str(value.size(), '\n', value.substr(0, piece_bytes)), timeout, watch);
  size_t longest = 0;
  for (std::string& text : result.values) {
    std::string_view rest = text;
    longest = std::max(longest, static_cast<size_t>(take_line(rest)));
    text.erase(0, text.size() - rest.size());
  }
  for (size_t offset = piece_bytes; offset < longest; offset += piece_bytes) {
    const Result more =
        run_piece(offset < value.size() ? value.substr(offset, piece_bytes) : std::string(), timeout, watch);
    if (more.values.empty()) return more;
    for (size_t rank = 0; rank < more.values.size(); ++rank) result.values[rank] += more.values[rank];
  }
  return result;
}

StoreExchange::Result StoreExchange::run_piece(const std::string& value, std::chrono::milliseconds timeout,
                                               const std::function<void()>& watch) {
  ++round_;
  store_.set(value_key(rank_), str(round_, '\n', value));
  Result result;
  const int64_t arrived = store_.add("arrived", 1);
  std::string packed = await_result(arrived, timeout, watch, result);
  if (!packed.starts_with(kGivenUp)) {
    result.values = unpack(packed, size_, round_);
    // Every rank that has come has read the one before.
    if (rank_ == 0 && round_ > 1) store_.erase(result_key(round_ - 1));
  } else if (result.cause.empty()) {
    // Another rank has given up.
    result.cause = packed.substr(kGivenUp.size());
    result.of_peer = true;
  }
  return result;
}

int64_t StoreExchange::check_still_there(int64_t arrived) const {
  const int64_t now = store_.add("arrived", 0);
  if (now < arrived) throw removed_from_store("arrived");
  if (!has_arrived(rank_)) throw removed_from_store(value_key(rank_));
  // A rank that has come to the next exchange has read it.
  if (now > round_ * size_ && !store_.has(result_key(round_))) throw removed_from_store(result_key(round_));
  return now;
}

std::string StoreExchange::await_result(int64_t arrived, std::chrono::milliseconds timeout,
                                        const std::function<void()>& watch, Result& failure) const {
  const int64_t all = round_ * size_;
  std::string for_others = "others gave up";
  try {
    std::optional<std::string> result;
    bool passes_on = rank_ == 0;
    const auto has_result = [&] {
      if (passes_on && (arrived == all || store_.add("arrived", 0) == all))
        result = store_.claim(result_key(round_), pack(store_.get_all("value/", all_ranks(size_))));
      else
        result = store_.find(result_key(round_));
      return result.has_value();
    };
    auto next_check = Clock::now() + kStoreCheckInterval;
    bool all_had_come = false;
    const auto watch_others = [&] {
      watch();
      passes_on = passes_on || arrived == all;  // rank 0 may have been interrupted
      if (Clock::now() < next_check) return;
      next_check = Clock::now() + kStoreCheckInterval;
      // All have come since the last check, and this rank does not find what rank 0 or the last one has
      // passed on.
      const bool all_have_come = check_still_there(arrived) == all;
      passes_on = passes_on || (all_have_come && all_had_come);
      all_had_come = all_have_come;
    };
    if (store_.await(has_result, timeout, watch_others)) return *result;
    for (int rank = 0; rank < size_; ++rank)
      if (!has_arrived(rank)) failure.missing.push_back(rank);
    failure.cause = str("timed out after ", name_duration(timeout), ": ",
                        failure.missing.empty() ? "all ranks came, but none has passed on what they said"
                                                : "not all ranks came");
  } catch (const CommError& error) {
    failure.cause = for_others = error.what();
    failure.of_peer = dynamic_cast<const PeerFailure*>(&error) != nullptr;
  }
  return store_.claim(result_key(round_), str(kGivenUp, for_others));
}

std::vector<std::string> StoreExchange::ask_all(const std::string& value, std::chrono::milliseconds timeout,
                                                std::string_view question) {
  Result result = run(value, timeout, [] {});
  if (!result.missing.empty()) throw CommError(name_ranks(result.missing), " left during the rendezvous");
  if (result.values.empty())
    result.fail(str("rank ", rank_, " at the rendezvous (", question, "): ", result.cause));
  return std::move(result.values);
}

std::string StoreExchange::first_obstacle(const std::string& mine, std::chrono::milliseconds timeout,
                                          std::string_view question) {
  const std::vector<std::string> all = ask_all(mine, timeout, question);
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) return str("rank ", rank, ": ", all[rank]);
  return "";
}

bool StoreExchange::has_arrived(int rank) const {
  const std::optional<std::string> text = store_.find(value_key(rank));
  if (!text) return false;
  std::string_view value = *text;
  return take_line(value) >= round_;
}

}  // namespace tessera::comm

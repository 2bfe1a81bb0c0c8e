#include "comm/history.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

int64_t parse_integer(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw CommError(str("a peer's list of collectives cannot be read at '", text, "'"));
  }
  return value;
}

/// Takes the text up to `separator` off the front.
std::string_view take(std::string_view& text, char separator) {
  const size_t at = text.find(separator);
  if (at == text.npos) throw CommError(str("a peer's list of collectives cannot be read at '", text, "'"));
  const std::string_view head = text.substr(0, at);
  text.remove_prefix(at + 1);
  return head;
}

}  // namespace

std::string Call::text() const {
  std::string out = label.empty() ? op : str(op, " of \"", label, "\"");
  if (!dtype.empty()) out += str(" (", numel, " x ", dtype, ")");
  return out;
}

uint32_t Call::fingerprint() const {
  const std::string text = str(op, '\n', label, '\n', dtype, '\n', numel);
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const unsigned char c : text) hash = (hash ^ c) * 16777619u;
  return (hash >> 16) ^ (hash & 0xffffu);
}

int64_t History::record(Call call) {
  std::replace_if(
      call.label.begin(), call.label.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  calls_.push_back(std::move(call));
  if (calls_.size() > kWindow) calls_.pop_front();
  return ++issued_;
}

const Call* History::find(int64_t number) const {
  const int64_t first = issued_ - static_cast<int64_t>(calls_.size()) + 1;
  if (number < first || number > issued_) return nullptr;
  return &calls_[static_cast<size_t>(number - first)];
}

std::string History::encode() const {
  std::string out = str(issued_, '\n', calls_.size(), '\n');
  for (const Call& call : calls_) {
    out += str(call.op, '\t', call.label, '\t', call.dtype, '\t', call.numel, '\n');
  }
  return out;
}

History History::decode(std::string_view text) {
  History history;
  history.issued_ = parse_integer(take(text, '\n'));
  const int64_t num_calls = parse_integer(take(text, '\n'));
  for (int64_t i = 0; i < num_calls; ++i) {
    Call call;
    call.op = take(text, '\t');
    call.label = take(text, '\t');
    call.dtype = take(text, '\t');
    call.numel = parse_integer(take(text, '\n'));
    history.calls_.push_back(std::move(call));
  }
  return history;
}

std::optional<int64_t> first_difference(const History& a, const History& b) {
  const int64_t last = std::min(a.issued(), b.issued());
  const int64_t window = static_cast<int64_t>(History::kWindow);
  for (int64_t number = std::max<int64_t>(1, last - window + 1); number <= last; ++number) {
    const Call* left = a.find(number);
    const Call* right = b.find(number);
    if (left != nullptr && right != nullptr && !(*left == *right)) return number;
  }
  return std::nullopt;
}

}  // namespace tessera::comm

#include "comm/control/diagnosis.h"

#include <algorithm>
#include <map>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/control/liveness.h"
#include "core/error.h"
#include "core/parse_number.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

[[noreturn]] void cannot_read(std::string_view text) {
  throw CommError("a peer's list of collectives cannot be read at '", text, "'");
}

constexpr std::string_view kFaultNames[] = {"none", "timeout", "closed"};  // by Fault

Fault parse_fault(std::string_view text) {
  const auto* name = std::find(std::begin(kFaultNames), std::end(kFaultNames), text);
  if (name == std::end(kFaultNames)) cannot_read(text);
  return static_cast<Fault>(name - std::begin(kFaultNames));
}

}  // namespace

int64_t parse_integer(std::string_view text) {
  if (const auto value = parse_number<int64_t>(text)) return *value;
  cannot_read(text);
}

std::string_view take(std::string_view& text, char separator) {
  const size_t at = text.find(separator);
  if (at == text.npos) cannot_read(text);
  const std::string_view head = text.substr(0, at);
  text.remove_prefix(at + 1);
  return head;
}

std::string without_controls(std::string text) {
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  return text;
}

std::string CollectiveDesc::text() const {
  std::string out = label.empty() ? op : str(op, " of \"", label, "\"");
  if (!dtype.empty()) out += str(" (", numel, " x ", dtype, ")");
  return out;
}

uint32_t CollectiveDesc::fingerprint() const {
  const std::string text = str(op, '\n', label, '\n', dtype, '\n', numel);
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const unsigned char c : text) hash = (hash ^ c) * 16777619u;
  return (hash >> 16) ^ (hash & 0xffffu);
}

int64_t RankReport::record(CollectiveDesc desc) {
  desc.label = without_controls(std::move(desc.label));
  recent.push_back(std::move(desc));
  if (recent.size() > kWindow) recent.pop_front();
  return ++num_issued;
}

const CollectiveDesc* RankReport::find(int64_t number) const {
  const int64_t first = num_issued - static_cast<int64_t>(recent.size()) + 1;
  if (number < first || number > num_issued) return nullptr;
  return &recent[static_cast<size_t>(number - first)];
}

namespace {

using Calls = std::deque<CollectiveDesc>;

std::string encode_state(const RankReport& report) {
  return str(kFaultNames[static_cast<size_t>(report.fault)], '\n', report.waited.count(), '\n',
             report.num_issued, '\n');
}

void decode_state(std::string_view& text, RankReport& report) {
  report.fault = parse_fault(take(text, '\n'));
  report.waited = std::chrono::milliseconds(parse_integer(take(text, '\n')));
  report.num_issued = parse_integer(take(text, '\n'));
}

std::string encode_calls(const Calls& calls) {
  std::string out = str(calls.size(), '\n');
  for (const CollectiveDesc& desc : calls)
    out += str(desc.op, '\t', desc.label, '\t', desc.dtype, '\t', desc.numel, '\n');
  return out;
}

Calls decode_calls(std::string_view& text) {
  Calls calls;
  for (int64_t left = parse_integer(take(text, '\n')); left > 0; --left) {
    CollectiveDesc& desc = calls.emplace_back();
    desc.op = take(text, '\t');
    desc.label = take(text, '\t');
    desc.dtype = take(text, '\t');
    desc.numel = parse_integer(take(text, '\n'));
  }
  return calls;
}

}  // namespace

std::string RankReport::encode() const { return encode_state(*this) + encode_calls(recent); }

RankReport RankReport::decode(std::string_view& text) {
  RankReport report;
  decode_state(text, report);
  report.recent = decode_calls(text);
  return report;
}

std::string pack_reports(const std::vector<RankReport>& reports) {
  std::map<std::string, size_t> numbers;  // of lists of calls
  std::string lists, states;
  for (const RankReport& report : reports) {
    const auto [list, is_new] = numbers.try_emplace(encode_calls(report.recent), numbers.size());
    if (is_new) lists += list->first;
    states += str(list->second, '\n', report.left.size(), '\n', report.left, encode_state(report));
  }
  return str(numbers.size(), '\n', lists, states);
}

std::vector<RankReport> unpack_reports(std::string_view packed, int size) {
  std::vector<Calls> lists;
  for (int64_t left = parse_integer(take(packed, '\n')); left > 0; --left)
    lists.push_back(decode_calls(packed));
  std::vector<RankReport> reports(static_cast<size_t>(size));
  for (RankReport& report : reports) {
    const auto list = static_cast<size_t>(parse_integer(take(packed, '\n')));
    const auto length = static_cast<size_t>(parse_integer(take(packed, '\n')));
    if (list >= lists.size() || length > packed.size()) cannot_read(packed);
    report.recent = lists[list];
    report.left = packed.substr(0, length);
    packed.remove_prefix(length);
    decode_state(packed, report);
  }
  if (!packed.empty()) cannot_read(packed);
  return reports;
}

std::optional<int64_t> first_difference(const RankReport& a, const RankReport& b) {
  const int64_t last = std::min(a.num_issued, b.num_issued);
  const int64_t window = static_cast<int64_t>(RankReport::kWindow);
  for (int64_t number = std::max<int64_t>(1, last - window + 1); number <= last; ++number) {
    const CollectiveDesc* left = a.find(number);
    const CollectiveDesc* right = b.find(number);
    if (left != nullptr && right != nullptr && !(*left == *right)) return number;
  }
  return std::nullopt;
}

std::string describe_difference(int64_t number, int rank_a, const RankReport& a, int rank_b,
                                const RankReport& b) {
  return str("collective ", number, " differs between ranks: rank ", rank_a, " issued ",
             a.find(number)->text(), ", rank ", rank_b, " issued ", b.find(number)->text());
}

// ------------------------------------------------------------------------------------------ diagnose()

namespace {

const RankReport& own_report(const Failure& failure) {
  return failure.reports[static_cast<size_t>(failure.rank)];
}

std::string named(std::vector<int> ranks, const Failure& failure) {
  for (int& rank : ranks) rank = failure.name(rank);
  return name_ranks(ranks);
}

/// Another rank issued something else under the same number.
std::string differences(const Failure& failure) {
  const RankReport& own = own_report(failure);
  for (size_t r = 0; r < failure.reports.size(); ++r) {
    if (const auto number = first_difference(own, failure.reports[r]))
      return describe_difference(*number, failure.name(failure.rank), own, failure.name(static_cast<int>(r)),
                                 failure.reports[r]);
  }
  return "";
}

std::string who_left(const Failure& failure) {
  std::string out;
  for (size_t r = 0; r < failure.reports.size(); ++r) {
    const std::string& left = failure.reports[r].left;
    if (static_cast<int>(r) == failure.rank || left.empty()) continue;
    out +=
        str(out.empty() ? "" : "; ", "rank ", failure.name(static_cast<int>(r)), " left the group: ", left);
  }
  return out;
}

/// A rank that arrives after the others have given up finds its connections closed at once.
bool arrived_late(const RankReport& report, const Failure& failure) {
  return report.fault == Fault::kClosed && report.waited < failure.timeout / 10;
}

std::string absences(const Failure& failure) {
  std::vector<int> absent = failure.missing;
  std::vector<int> behind;
  bool any_timed_out = !failure.missing.empty();
  for (size_t r = 0; r < failure.reports.size(); ++r) {
    const RankReport& report = failure.reports[r];
    any_timed_out = any_timed_out || report.fault == Fault::kTimeout;
    const int rank = static_cast<int>(r);
    if (!failure.missing.empty() || rank == failure.rank) continue;
    if (report.fault == Fault::kNone) {
      absent.push_back(rank);
    } else if (report.num_issued < failure.number || arrived_late(report, failure)) {
      behind.push_back(rank);
    }
  }
  if (any_timed_out && arrived_late(own_report(failure), failure)) return "";
  if (!any_timed_out) {
    // A rank that is alive and has not reported yet is only slow.
    if (!failure.gone.empty())
      std::erase_if(
          absent, [&](int rank) { return std::count(failure.gone.begin(), failure.gone.end(), rank) == 0; });
    if (absent.empty()) return "";
    const bool no_answer = std::all_of(absent.begin(), absent.end(), [&](int rank) {
      return std::count(failure.silent.begin(), failure.silent.end(), rank) > 0;
    });
    return str(named(absent, failure), absent.size() == 1 ? " is" : " are", " gone (",
               no_answer ? RankIsGone::kHostIsSilent : RankIsGone::kConnectionClosed, ")");
  }
  absent.insert(absent.end(), behind.begin(), behind.end());
  std::sort(absent.begin(), absent.end());
  if (absent.empty()) return "";
  return str(named(absent, failure), absent.size() == 1 ? " has" : " have", " not arrived within ",
             name_duration(failure.timeout));
}

/// All ranks arrived, yet it failed.
std::string other_causes(const Failure& failure) {
  std::vector<int> gave_up;
  for (size_t r = 0; r < failure.reports.size(); ++r) {
    if (failure.reports[r].fault == Fault::kTimeout) gave_up.push_back(static_cast<int>(r));
  }
  if (own_report(failure).fault == Fault::kTimeout) {
    return str("all ranks arrived, but it was not done within ", name_duration(failure.timeout));
  }
  if (!gave_up.empty()) {
    return str("rank ", failure.name(failure.rank), " came too late: ", named(gave_up, failure),
               " had given up after ", name_duration(failure.timeout));
  }
  return str("a connection between ranks broke (", failure.cause, ")");
}

}  // namespace

bool is_of_peer(const Failure& failure) {
  return differences(failure).empty() && (!failure.gone.empty() || !who_left(failure).empty());
}

std::string diagnose(const Failure& failure) {
  if (std::string text = differences(failure); !text.empty()) return text;
  const CollectiveDesc* desc = own_report(failure).find(failure.number);
  std::string reason = who_left(failure);
  if (reason.empty()) reason = absences(failure);
  if (reason.empty()) reason = other_causes(failure);
  return str(desc != nullptr ? desc->text() : "a collective", ", collective ", failure.number, ": ", reason);
}

}  // namespace tessera::comm

#include "comm/explain.h"

#include <algorithm>

#include "core/str.h"

namespace tessera::comm {
namespace {

const char* have(const std::vector<int>& ranks) { return ranks.size() == 1 ? "has" : "have"; }
const char* are(const std::vector<int>& ranks) { return ranks.size() == 1 ? "is" : "are"; }

/// Another rank issued something else under the same number.
std::string difference(const Failure& failure, const History& own) {
  for (size_t r = 0; r < failure.reports.size(); ++r) {
    if (const auto number = first_difference(own, failure.reports[r].history)) {
      return str("collective ", *number, " differs between ranks: rank ", failure.rank, " issued ",
                 own.find(*number)->text(), ", rank ", r, " issued ",
                 failure.reports[r].history.find(*number)->text());
    }
  }
  return "";
}

std::string departures(const Failure& failure) {
  std::string out;
  for (size_t r = 0; r < failure.reports.size(); ++r) {
    const std::string& left = failure.reports[r].left;
    if (static_cast<int>(r) == failure.rank || left.empty()) continue;
    out += str(out.empty() ? "" : "; ", "rank ", r, " left the group: ", left);
  }
  return out;
}

/// A rank that comes after the others have given up finds its connections closed at once.
bool came_late(const Report& report, const Failure& failure) {
  return report.fault == Fault::kClosed && report.waited < failure.timeout / 10;
}

std::string absences(const Failure& failure) {
  std::vector<int> absent = failure.missing;
  std::vector<int> behind;
  bool anyone_timed_out = !failure.missing.empty();
  for (size_t r = 0; r < failure.reports.size(); ++r) {
    const Report& report = failure.reports[r];
    anyone_timed_out = anyone_timed_out || report.fault == Fault::kTimeout;
    const int rank = static_cast<int>(r);
    if (!failure.missing.empty() || rank == failure.rank) continue;
    if (report.fault == Fault::kNone) {
      absent.push_back(rank);
    } else if (report.history.issued() < failure.number || came_late(report, failure)) {
      behind.push_back(rank);
    }
  }
  if (anyone_timed_out && came_late(failure.reports[static_cast<size_t>(failure.rank)], failure)) return "";
  if (!anyone_timed_out) {
    // One that is alive and has not reported yet is only slow.
    if (!failure.gone.empty())
      std::erase_if(
          absent, [&](int rank) { return std::count(failure.gone.begin(), failure.gone.end(), rank) == 0; });
    if (absent.empty()) return "";
    return str(name_ranks(absent), " ", are(absent), " gone (connection closed)");
  }
  absent.insert(absent.end(), behind.begin(), behind.end());
  std::sort(absent.begin(), absent.end());
  if (absent.empty()) return "";
  return str(name_ranks(absent), " ", have(absent), " not arrived within ", name_duration(failure.timeout));
}

/// All ranks came, yet it failed.
std::string leftovers(const Failure& failure) {
  std::vector<int> gave_up;
  for (size_t r = 0; r < failure.reports.size(); ++r) {
    if (failure.reports[r].fault == Fault::kTimeout) gave_up.push_back(static_cast<int>(r));
  }
  if (failure.reports[static_cast<size_t>(failure.rank)].fault == Fault::kTimeout) {
    return str("all ranks arrived, but it was not done within ", name_duration(failure.timeout));
  }
  if (!gave_up.empty()) {
    return str("rank ", failure.rank, " came too late: ", name_ranks(gave_up), " had given up after ",
               name_duration(failure.timeout));
  }
  return str("a connection between ranks broke (", failure.cause, ")");
}

}  // namespace

std::string explain(const Failure& failure) {
  const History& own = failure.reports[static_cast<size_t>(failure.rank)].history;
  if (std::string text = difference(failure, own); !text.empty()) return text;
  const Call* call = own.find(failure.number);
  std::string reason = departures(failure);
  if (reason.empty()) reason = absences(failure);
  if (reason.empty()) reason = leftovers(failure);
  return str(call != nullptr ? call->text() : "a collective", ", collective ", failure.number, ": ", reason);
}

std::string name_ranks(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) out += i + 1 == ranks.size() ? " and " : ", ";
    out += std::to_string(ranks[i]);
  }
  return out;
}

std::string name_duration(std::chrono::milliseconds duration) {
  if (duration >= std::chrono::minutes(2) && duration % std::chrono::minutes(1) == duration.zero()) {
    return str(duration / std::chrono::minutes(1), " min");
  }
  return str(static_cast<double>(duration.count()) / 1000, " s");
}

std::string first_line(std::string_view text) {
  std::string line(text.substr(0, text.find('\n')));
  // "[enforce fail at x.cc:1] message", "failed with [/src/x.h:1] message": no
  // need to know where in the library.
  for (const char* extension : {".cc:", ".cpp:", ".h:", ".hpp:"}) {
    const size_t at = line.find(extension);
    const size_t begin = at == line.npos ? at : line.rfind('[', at);
    const size_t end = at == line.npos ? at : line.find("] ", at);
    if (begin != line.npos && end != line.npos) line.erase(begin, end + 2 - begin);
  }
  return line;
}

}  // namespace tessera::comm

#include "comm/waits.h"

#include <algorithm>
#include <sstream>

#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

/// Whether `a`, which waits, needs `b` to issue something first, while `b` waits as well. (A group that `b`
/// does not list is in the hands of another thread of `b`'s, which may be at work.)
bool needs(const Waiting& a, const Waiting& b) {
  const auto issued = b.issued.find(a.group);
  return issued != b.issued.end() && issued->second < a.number;
}

/// Extends `path` to a circle back to its first rank. Depth first; ranks looked at are not looked at again.
bool close_circle(const std::vector<std::optional<Waiting>>& waiting, std::vector<int>& path,
                  std::vector<bool>& seen) {
  const Waiting& last = *waiting[static_cast<size_t>(path.back())];
  for (size_t next = 0; next < waiting.size(); ++next) {
    if (!waiting[next] || static_cast<int>(next) == path.back() || !needs(last, *waiting[next])) continue;
    if (static_cast<int>(next) == path.front()) return true;
    if (seen[next]) continue;
    seen[next] = true;
    path.push_back(static_cast<int>(next));
    if (close_circle(waiting, path, seen)) return true;
    path.pop_back();
  }
  return false;
}

}  // namespace

std::string Waiting::encode() const {
  std::string out = str(group, '\n', number, '\n', text, '\n');
  for (const auto& [name, count] : issued) out += str(count, ' ', name, '\n');
  return out;
}

Waiting Waiting::decode(std::string_view text) {
  std::istringstream in{std::string(text)};
  Waiting waiting;
  std::string line;
  const bool complete = std::getline(in, waiting.group) && in >> waiting.number && in.get() == '\n' &&
                        std::getline(in, waiting.text);
  if (!complete) throw CommError(str("not a list of what a rank waits for: ", text.substr(0, 80)));
  int64_t count = 0;
  while (in >> count && in.get() == ' ' && std::getline(in, line)) waiting.issued[line] = count;
  if (!in.eof()) throw CommError(str("not a list of what a rank waits for: ", text.substr(0, 80)));
  return waiting;
}

std::optional<std::string> describe_circle(const std::vector<std::optional<Waiting>>& waiting, int rank) {
  if (!waiting[static_cast<size_t>(rank)]) return std::nullopt;
  std::vector<int> path{rank};
  std::vector<bool> seen(waiting.size(), false);
  seen[static_cast<size_t>(rank)] = true;
  if (!close_circle(waiting, path, seen)) return std::nullopt;
  // From the lowest rank on, so that all ranks say the same.
  std::rotate(path.begin(), std::min_element(path.begin(), path.end()), path.end());
  std::string out = "the ranks wait for each other: ";
  for (size_t i = 0; i < path.size(); ++i) {
    const int next = path[(i + 1) % path.size()];
    out += str(i == 0 ? "" : "; ", "rank ", path[i], " waits in ",
               waiting[static_cast<size_t>(path[i])]->text, ", which rank ", next, " has not come to");
  }
  return out;
}

}  // namespace tessera::comm

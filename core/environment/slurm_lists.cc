#include "core/environment/slurm_lists.h"

#include <cstdint>
#include <optional>

#include "core/error.h"
#include "core/parse_number.h"
#include "core/str.h"

namespace tessera {
namespace {

constexpr size_t kMaxEntries = 65'536;

/// The part before the next comma outside of brackets; `text` is left with what follows the comma.
std::string_view take_item(std::string_view& text) {
  int depth = 0;
  size_t end = 0;
  for (; end < text.size() && (depth > 0 || text[end] != ','); ++end) {
    if (text[end] == '[') ++depth;
    if (text[end] == ']') --depth;
  }
  const std::string_view item = text.substr(0, end);
  text = end < text.size() ? text.substr(end + 1) : std::string_view();
  return item;
}

[[noreturn]] void refuse_hosts(std::string_view whole) {
  throw ConfigError("'", whole, "' is not a list of hosts; expected names as in n[01-03,7],m2");
}

}  // namespace

std::string first_host(std::string_view text) {
  const std::string_view whole = text;
  std::string_view item = take_item(text);
  std::string name;
  for (size_t open = item.find('['); open != item.npos; open = item.find('[')) {
    const size_t close = item.find(']', open);
    if (close == item.npos) refuse_hosts(whole);
    const std::string_view ranges = item.substr(open + 1, close - open - 1);
    const std::string_view number = ranges.substr(0, ranges.find_first_of("-,"));
    if (!parse_count(number)) refuse_hosts(whole);
    name += str(item.substr(0, open), number);
    item.remove_prefix(close + 1);
  }
  name += item;
  if (name.empty() || name.find(']') != name.npos) refuse_hosts(whole);
  return name;
}

std::vector<int> expand_task_counts(std::string_view text) {
  const std::string_view whole = text;
  std::vector<int> counts;
  do {
    std::string_view item = take_item(text);
    int64_t times = 1;
    bool good = !whole.ends_with(',');
    if (const size_t open = item.find("(x"); open != item.npos) {
      const auto given =
          item.back() == ')' ? parse_count(item.substr(open + 2, item.size() - open - 3)) : std::nullopt;
      good = good && given && *given >= 1 && *given <= static_cast<int64_t>(kMaxEntries);
      times = given.value_or(0);
      item = item.substr(0, open);
    }
    const auto count = parse_count(item);
    if (!good || !count || *count > (1 << 20) || counts.size() + static_cast<size_t>(times) > kMaxEntries)
      throw ConfigError("'", whole, "' is not a list of tasks a host; expected one as in 2(x3),1");
    counts.insert(counts.end(), static_cast<size_t>(times), static_cast<int>(*count));
  } while (!text.empty());
  return counts;
}

}  // namespace tessera

#include "core/environment/slurm_lists.h"

#include <cstdint>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/parse_number.h"

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

/// Adds the numbers of "01-03" or "7".
void add_range(std::string_view range, std::string_view whole, std::vector<std::string>& numbers) {
  const size_t dash = range.find('-');
  const std::string_view low = range.substr(0, dash);
  const auto first = parse_count(low);
  const auto last = dash == range.npos ? first : parse_count(range.substr(dash + 1));
  if (!first || !last || *last < *first || *last - *first >= static_cast<int64_t>(kMaxEntries))
    refuse_hosts(whole);
  for (int64_t value = *first; value <= *last; ++value) {
    std::string digits = std::to_string(value);
    if (digits.size() < low.size()) digits.insert(0, low.size() - digits.size(), '0');
    numbers.push_back(std::move(digits));
  }
}

/// The names that one item such as "r[1-2]n[1-2]" stands for.
std::vector<std::string> expand_item(std::string_view item, std::string_view whole) {
  std::vector<std::string> names = {""};
  while (!item.empty()) {
    const size_t open = item.find('[');
    for (std::string& name : names) name += item.substr(0, open);
    if (open == item.npos) break;
    const size_t close = item.find(']', open);
    if (close == item.npos) refuse_hosts(whole);
    std::string_view ranges = item.substr(open + 1, close - open - 1);
    std::vector<std::string> numbers, longer;
    do {
      add_range(take_item(ranges), whole, numbers);
    } while (!ranges.empty());
    if (names.size() * numbers.size() > kMaxEntries) refuse_hosts(whole);
    for (const std::string& name : names)
      for (const std::string& number : numbers) longer.push_back(name + number);
    names = std::move(longer);
    item = item.substr(close + 1);
  }
  return names;
}

}  // namespace

std::vector<std::string> expand_host_list(std::string_view text) {
  const std::string_view whole = text;
  std::vector<std::string> hosts;
  if (text.ends_with(',')) refuse_hosts(whole);
  do {
    for (std::string& name : expand_item(take_item(text), whole)) {
      if (name.empty() || name.find(']') != name.npos || hosts.size() >= kMaxEntries) refuse_hosts(whole);
      hosts.push_back(std::move(name));
    }
  } while (!text.empty());
  return hosts;
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

#include "launcher/environment/hosts.h"

#include <arpa/inet.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <optional>
#include <sstream>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "core/parse_number.h"
#include "core/str.h"
#include "core/utf8.h"
#include "launcher/environment/environment.h"

namespace tessera::launcher {
namespace {

constexpr int kMaxNumber = 1 << 20;
constexpr size_t kLongestHostName = 253;  // of DNS

/// The part before the next separator; `text` is left with what follows it.
std::string_view take_item(std::string_view& text, char separator) {
  const size_t end = text.find(separator);
  const std::string_view item = text.substr(0, end);
  text = end == text.npos ? std::string_view() : text.substr(end + 1);
  return item;
}

template <class Hosts>
auto find_host(Hosts& hosts, std::string_view name) {
  return std::find_if(hosts.begin(), hosts.end(), [&](const Host& host) { return host.name == name; });
}

bool is_word(std::string_view text) {
  const auto is_good = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '-' || c == '_';
  };
  return !text.empty() && text[0] != '-' && std::all_of(text.begin(), text.end(), is_good);
}

/// With the interface of a link-local one behind '%'.
bool is_ipv6(const std::string& text) {
  const size_t zone = text.find('%');
  in6_addr address{};
  if (text.find('\0') != text.npos) return false;
  return ::inet_pton(AF_INET6, text.substr(0, zone).c_str(), &address) == 1 &&
         (zone == text.npos || is_word(text.substr(zone + 1)));
}

/// "n1", "user@n1", "10.0.0.1", "fe80::1%eth0", "[::1]". nullopt: anything else, which a shell or ssh might
/// take for something other than a host.
std::optional<Host> parse_host(std::string text) {
  Host host;
  if (const size_t at = text.find('@'); at != text.npos) {
    host.user = text.substr(0, at);
    text.erase(0, at + 1);
    if (!is_word(host.user)) return std::nullopt;
  }
  if (text.size() > 2 && text.front() == '[' && text.back() == ']' && text.find(':') != text.npos)
    text = text.substr(1, text.size() - 2);
  if (text.size() > kLongestHostName || !(is_word(text) || is_ipv6(text))) return std::nullopt;
  host.name = std::move(text);
  return host;
}

/// N of "slots=N max_slots=M", in any order; M has no effect. nullopt: another form.
std::optional<int> parse_slots(std::istringstream& words) {
  std::optional<int> slots, most;
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    std::optional<int>& value = key == "slots" ? slots : most;
    const bool is_known = key == "slots" || key == "max_slots" || key == "max-slots";
    if (equals == word.npos || !is_known || value) return std::nullopt;
    value = parse_count<int>(std::string_view(word).substr(equals + 1));
    if (!value || *value < 1) return std::nullopt;
  }
  return slots && *slots <= kMaxRanks && *slots <= most.value_or(*slots) ? slots : std::nullopt;
}

/// One NAME[:SLOTS] of a filter; the slots are those of the hostfile where it names none.
Host parse_filter(std::string_view item, const std::vector<Host>& hosts, std::string_view option) {
  const size_t colon =
      find_host(hosts, item) == hosts.end() ? item.rfind(':') : item.npos;  // an IPv6 address has its own
  const std::string_view name = item.substr(0, colon);
  const auto host = find_host(hosts, name);
  if (host == hosts.end()) {
    std::vector<std::string> names;
    for (const Host& one : hosts) names.push_back(one.name);
    throw ConfigError(option, ": host ", quoted_name(name), " is not in the hostfile, which has ",
                      join(names, ", "));
  }
  if (colon == item.npos) return *host;
  Host chosen{host->name, parse_numbers(item.substr(colon + 1), option), host->user};
  for (const int slot : chosen.slots)
    if (std::find(host->slots.begin(), host->slots.end(), slot) == host->slots.end())
      throw ConfigError(option, ": host '", name, "' has no slot ", slot, "; expected 0 to ",
                        host->slots.size() - 1);
  return chosen;
}

void add_slots(Host& host, const std::vector<int>& slots) {
  for (const int slot : slots)
    if (std::find(host.slots.begin(), host.slots.end(), slot) == host.slots.end()) host.slots.push_back(slot);
  std::sort(host.slots.begin(), host.slots.end());
}

}  // namespace

std::vector<int> parse_numbers(std::string_view text, std::string_view option) {
  const std::string_view whole = text;
  std::vector<int> numbers;
  bool good = !text.empty() && !text.ends_with(',');
  while (good && !text.empty()) {
    const std::string_view item = take_item(text, ',');
    const size_t dash = item.find('-');
    const auto first = parse_count<int>(item.substr(0, dash));
    const auto last = dash == item.npos ? first : parse_count<int>(item.substr(dash + 1));
    good = first && last && *first <= *last && *last < kMaxNumber;
    for (int number = good ? *first : 1, end = good ? *last : 0; number <= end; ++number)
      numbers.push_back(number);
  }
  if (!good)
    throw ConfigError(option, ": '", whole, "' is not a list of numbers; expected one as in 0,2 or 0-3");
  return numbers;
}

std::vector<Host> read_hostfile(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw ConfigError("--hostfile ", path, ": the file cannot be read");
  std::vector<Host> hosts;
  std::unordered_set<std::string> names;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const std::string before_comment = line.substr(0, line.find('#'));
    std::istringstream words(before_comment);
    std::string name;
    if (!(words >> name)) continue;
    const std::string where = str(path, ":", number, ": ");
    const auto count = parse_slots(words);
    if (!count)
      throw ConfigError(where, quoted_name(line), ": expected HOST slots=N, with 1 to ", kMaxRanks, " slots");
    std::optional<Host> host = parse_host(name);
    if (!host)
      throw ConfigError(
          where, quoted_name(name),
          " is no host; expected HOST or USER@HOST, of letters, digits, '.', '-' and '_' and not "
          "beginning with '-', or an address");
    if (!names.insert(host->name).second)
      throw ConfigError(where, "host '", host->name,
                        "' stands there twice; expected one line with all its slots");
    if (hosts.size() == kMaxRanks)
      throw ConfigError(where, "more than ", kMaxRanks, " hosts; expected at most that many");
    host->slots.resize(static_cast<size_t>(*count));
    std::iota(host->slots.begin(), host->slots.end(), 0);
    hosts.push_back(*std::move(host));
  }
  if (file.bad() || hosts.empty())
    throw ConfigError("--hostfile ", path, ": no hosts; expected lines HOST slots=N");
  return hosts;
}

std::vector<Host> select_hosts(const std::vector<Host>& hosts, const std::string& include,
                               const std::string& exclude) {
  if (!include.empty() && !exclude.empty()) throw ConfigError("--include, --exclude: expected one of them");
  if (include.empty() && exclude.empty()) return hosts;
  const char* option = include.empty() ? "--exclude" : "--include";
  std::vector<Host> named = hosts;
  for (Host& host : named) host.slots.clear();
  std::string_view text = include.empty() ? exclude : include;
  while (!text.empty()) {
    const Host chosen = parse_filter(take_item(text, '@'), hosts, option);
    add_slots(*find_host(named, chosen.name), chosen.slots);
  }
  std::vector<Host> selected;
  for (size_t i = 0; i < hosts.size(); ++i) {
    Host host = named[i];
    if (include.empty()) {
      host.slots.clear();
      for (const int slot : hosts[i].slots)
        if (std::find(named[i].slots.begin(), named[i].slots.end(), slot) == named[i].slots.end())
          host.slots.push_back(slot);
    }
    if (!host.slots.empty()) selected.push_back(std::move(host));
  }
  if (selected.empty()) throw ConfigError(option, " ", include, exclude, ": no slot is left");
  return selected;
}

std::string encode_hosts(const std::vector<Host>& hosts) {
  std::vector<std::string> items;
  for (const Host& host : hosts) items.push_back(str(host.name, ":", join(host.slots, ",")));
  return join(items, "@");
}

std::vector<Host> decode_hosts(std::string_view text) {
  std::vector<Host> hosts;
  while (!text.empty()) {
    const std::string_view item = take_item(text, '@');
    const size_t colon = item.rfind(':');
    if (colon == item.npos || !parse_host(std::string(item.substr(0, colon))))
      throw ConfigError(kHostsVariable, ": ", quoted_name(item), " is not a host; expected HOST:SLOTS");
    hosts.push_back(
        {std::string(item.substr(0, colon)), parse_numbers(item.substr(colon + 1), kHostsVariable)});
  }
  return hosts;
}

}  // namespace tessera::launcher

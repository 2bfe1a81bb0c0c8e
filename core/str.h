// str(...): concatenates anything that can be streamed, for messages. Not fmt, because libtorch's wheel has a
// newer one than Debian, so neither may appear in our headers. Also forms that several messages use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <sstream>
#include <string>
#include <type_traits>

namespace tessera {

/// Concatenates the arguments as `operator<<` prints them; a path without the quotes that it adds.
template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  const auto add = [&](const auto& one) {
    if constexpr (std::is_same_v<std::decay_t<decltype(one)>, std::filesystem::path>)
      out << one.native();
    else
      out << one;
  };
  (add(args), ...);
  return out.str();
}

/// Items joined by a separator: join({"a", "b"}, ", ") is "a, b".
template <class Range>
std::string join(const Range& items, const char* separator) {
  std::ostringstream out;
  const char* sep = "";
  for (const auto& item : items) {
    out << sep << item;
    sep = separator;
  }
  return out.str();
}

/// What printf() would print.
__attribute__((format(printf, 1, 2))) std::string printed(const char* format, ...);

/// "[3, 4]"; "[]" for a scalar.
inline std::string describe_shape(std::span<const int64_t> shape) { return str("[", join(shape, ", "), "]"); }

/// 60000 as "60,000".
inline std::string format_count(int64_t value) {
  std::string text = std::to_string(value);
  for (int64_t at = static_cast<int64_t>(text.size()) - 3; at > (value < 0 ? 1 : 0); at -= 3)
    text.insert(static_cast<size_t>(at), 1, ',');
  return text;
}

}  // namespace tessera

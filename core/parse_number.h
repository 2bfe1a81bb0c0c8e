// Numbers in texts: what std::from_chars reads, so without spaces, a plus sign or a locale.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>
#include <system_error>

namespace tessera {

/// Takes the number that `text` begins with off its front. Nothing, and `text` is as it was: it begins with
/// none, or with one that `Number` cannot hold.
template <class Number>
std::optional<Number> take_number(std::string_view& text) {
  Number value{};
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(stop - text.data()));
  return value;
}

/// The number that all of `text` is; else nothing.
template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  const std::optional<Number> value = take_number<Number>(text);
  return text.empty() ? value : std::nullopt;
}

/// The same, from 0 on.
template <class Number = int64_t>
std::optional<Number> parse_count(std::string_view text) {
  const std::optional<Number> value = parse_number<Number>(text);
  return value && *value >= 0 ? value : std::nullopt;
}

}  // namespace tessera

// Binding: a Key together with the field it fills, so that a default is written once (in the struct), and
// reading, the defaults in the table and the resolved configuration cannot disagree. For .cc files only.
#pragma once

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/dtype.h"
#include "core/str.h"
#include "engine/config/check.h"
#include "engine/config/document.h"
#include "engine/config/key.h"

namespace tessera::config {

/// A value that passed `mismatch`, into a field.
template <class T>
void read_field(const nlohmann::json& value, T& field) {
  if constexpr (std::is_same_v<T, DType>) {
    field = *parse_dtype(value.get<std::string>());
  } else if constexpr (std::is_same_v<T, std::optional<DType>>) {
    field = value.is_null() ? std::nullopt : parse_dtype(value.get<std::string>());
  } else if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    field = value.is_null() ? T{0} : static_cast<T>(value.get<int64_t>());  // 5e8 is 500000000
  } else {
    field = value.get<T>();
  }
}

template <class T>
nlohmann::json write_field(const T& field) {
  if constexpr (std::is_same_v<T, DType>) {
    return std::string(name_of(field));
  } else if constexpr (std::is_same_v<T, std::optional<DType>>) {
    return field ? nlohmann::json(std::string(name_of(*field))) : nlohmann::json(nullptr);
  } else {
    return field;
  }
}

template <class Config>
struct Binding {
  Key key;
  std::function<void(const nlohmann::json&, Config&)> read;
  std::function<nlohmann::json(const Config&)> write;
};

/// `access`: [](auto& config) -> auto& { return config.field; }. The key's default is the field's.
template <class Config, class Access>
Binding<Config> bind(Key key, Access access) {
  const Config defaults;
  key.default_json = write_field(access(defaults)).dump();
  return {std::move(key),
          [access](const nlohmann::json& value, Config& config) { read_field(value, access(config)); },
          [access](const Config& config) { return write_field(access(config)); }};
}

/// A checked document's values into a config. "auto" becomes what the table says, and is reported.
template <class Config>
void read_bindings(const std::vector<Binding<Config>>& bindings, const Document& document, Config& config,
                   Report* report) {
  for (const Binding<Config>& binding : bindings) {
    const nlohmann::json* value = value_at(*document.json, binding.key.path);
    if (!value) continue;
    if (binding.key.takes_word_auto() && *value == "auto") {
      binding.read(nlohmann::json::parse(binding.key.auto_json), config);
      if (report) report->resolved.push_back(str(binding.key.path, ": \"auto\" is ", binding.key.auto_json));
    } else if (!value->is_null() || binding.key.nullable) {
      binding.read(*value, config);
    }
  }
}

/// Sets a dotted path, creating sections.
inline void set_value(nlohmann::ordered_json& root, const std::string& path, nlohmann::ordered_json value) {
  nlohmann::ordered_json* at = &root;
  for (size_t start = 0; start <= path.size();) {
    size_t dot = std::min(path.find('.', start), path.size());
    at = &(*at)[path.substr(start, dot - start)];
    start = dot + 1;
  }
  *at = std::move(value);
}

template <class Config>
void write_bindings(const std::vector<Binding<Config>>& bindings, const Config& config,
                    nlohmann::ordered_json& out) {
  for (const Binding<Config>& binding : bindings) set_value(out, binding.key.path, binding.write(config));
}

}  // namespace tessera::config

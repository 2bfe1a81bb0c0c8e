#include "engine/config/section.h"

#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "core/str.h"
#include "engine/config/key.h"
#include "engine/config/suggest.h"

namespace tessera::config {

using nlohmann::json;

struct Section::State {
  nlohmann::json object = nlohmann::json::object();
  nlohmann::json resolved = nlohmann::json::object();
  std::string path;
  Origins origins;
  std::set<std::string> asked;
};

namespace {

/// The value if it has the key's type and range.
template <class T>
T checked(const Section& section, Key key, const json& value) {
  if (std::string wrong = mismatch(key, value); !wrong.empty()) section.fail(key.path, wrong);
  if constexpr (std::is_same_v<T, int64_t>)
    return value.get<int64_t>();  // 5e8 is 500000000
  else
    return value.get<T>();
}

template <class T>
std::vector<T> checked_list(const Section& section, const Key& item, const json& value, const char* accepted_list) {
  if (!value.is_array())
    section.fail(item.path, str("found ", describe_value(value), "; expected ", accepted_list));
  std::vector<T> list;
  for (const json& element : value) list.push_back(checked<T>(section, item, element));
  return list;
}

}  // namespace

Section::Section() : state_(std::make_shared<State>()) {}

Section::Section(const nlohmann::json& object, std::string path, Origins origins) : state_(std::make_shared<State>()) {
  state_->path = std::move(path);
  state_->origins = std::move(origins);
  if (!object.is_object())
    throw ConfigError(str(state_->origins.where(state_->path), ": ", state_->path, ": found ", describe_value(object),
                          "; expected a section {…}"));
  state_->object = object;
  state_->resolved = object;
}

const nlohmann::json* Section::ask(const std::string& name, const nlohmann::json& fallback) const {
  state_->asked.insert(name);
  auto it = state_->object.find(name);
  if (it != state_->object.end()) return &*it;
  state_->resolved[name] = fallback;
  return nullptr;
}

const nlohmann::json& Section::require(const std::string& name, const std::string& accepted) const {
  state_->asked.insert(name);
  auto it = state_->object.find(name);
  if (it == state_->object.end()) fail(name, str("is missing; expected ", accepted));
  return *it;
}

bool Section::has(const std::string& name) const { return state_->object.contains(name); }

bool Section::boolean(const std::string& name, bool fallback) const {
  const auto* value = ask(name, fallback);
  return value ? checked<bool>(*this, config::boolean(name), *value) : fallback;
}

int64_t Section::integer(const std::string& name, int64_t fallback, int64_t min, int64_t max) const {
  const auto* value = ask(name, fallback);
  Key key = config::integer(name).range(static_cast<double>(min), static_cast<double>(max));
  return value ? checked<int64_t>(*this, key, *value) : fallback;
}

double Section::number(const std::string& name, double fallback, double min, double max) const {
  const auto* value = ask(name, fallback);
  return value ? checked<double>(*this, config::number(name).range(min, max), *value) : fallback;
}

std::string Section::text(const std::string& name, const std::string& fallback) const {
  const auto* value = ask(name, fallback);
  return value ? checked<std::string>(*this, config::text(name), *value) : fallback;
}

std::string Section::word(const std::string& name, const std::string& fallback,
                          const std::vector<std::string>& words) const {
  const auto* value = ask(name, fallback);
  if (!value) return fallback;
  Key key = config::word(name, words);
  return canonical_word(key, checked<std::string>(*this, key, *value));
}

std::vector<int64_t> Section::integers(const std::string& name, const std::vector<int64_t>& fallback, int64_t min,
                                       int64_t max) const {
  const auto* value = ask(name, fallback);
  Key item = config::integer(name).range(static_cast<double>(min), static_cast<double>(max));
  return value ? checked_list<int64_t>(*this, item, *value, "a list of integers") : fallback;
}

std::vector<double> Section::numbers(const std::string& name, const std::vector<double>& fallback, double min,
                                     double max) const {
  const auto* value = ask(name, fallback);
  return value ? checked_list<double>(*this, config::number(name).range(min, max), *value, "a list of numbers") : fallback;
}

std::vector<std::string> Section::texts(const std::string& name, const std::vector<std::string>& fallback) const {
  const auto* value = ask(name, fallback);
  return value ? checked_list<std::string>(*this, config::text(name), *value, "a list of strings") : fallback;
}

Section Section::section(const std::string& name) const {
  static const nlohmann::json kEmpty = nlohmann::json::object();
  const auto* value = ask(name, kEmpty);
  return Section(value ? *value : kEmpty, child_path(state_->path, name), state_->origins);
}

int64_t Section::required_integer(const std::string& name, int64_t min, int64_t max) const {
  Key key = config::integer(name).range(static_cast<double>(min), static_cast<double>(max));
  return checked<int64_t>(*this, key, require(name, accepted(key)));
}
double Section::required_number(const std::string& name, double min, double max) const {
  Key key = config::number(name).range(min, max);
  return checked<double>(*this, key, require(name, accepted(key)));
}
std::string Section::required_text(const std::string& name) const {
  Key key = config::text(name);
  return checked<std::string>(*this, key, require(name, accepted(key)));
}

void Section::finish() const {
  std::vector<std::string> known(state_->asked.begin(), state_->asked.end());
  for (const auto& [name, value] : state_->object.items()) {
    if (state_->asked.count(name)) continue;
    fail(name, str("unknown key", did_you_mean(name, known), ", found ", describe_value(value), "; expected ",
                   known.empty() ? "no keys here" : str("one of ", join(known, ", "))));
  }
}

void Section::fail(const std::string& name, const std::string& text) const {
  std::string path = child_path(state_->path, name);
  throw ConfigError(str(state_->origins.where(path), ": ", printable(path), ": ", text));
}

const nlohmann::json& Section::json() const { return state_->object; }
const nlohmann::json& Section::resolved() const { return state_->resolved; }
const std::string& Section::path() const { return state_->path; }

}  // namespace tessera::config

#include "engine/config/section.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/str.h"
#include "engine/config/document/suggest.h"
#include "engine/config/key.h"

namespace tessera::config {

using nlohmann::json;

struct Section::State {
  nlohmann::json object = nlohmann::json::object();
  nlohmann::json resolved = nlohmann::json::object();
  std::string path;
  Origins origins;
  std::set<std::string> read;
  Problems problems;
};

static Key key_of(Type type, const std::string& name, double min, double max) {
  return {.path = name, .type = type, .range = {.min = min, .max = max}};
}
static Key integer_key(const std::string& name, int64_t min, int64_t max) {
  return key_of(Type::kInteger, name, static_cast<double>(min), static_cast<double>(max));
}

Section::Section() : state_(std::make_shared<State>()) {}

Section::Section(const nlohmann::json& object, std::string path, Origins origins)
    : state_(std::make_shared<State>()) {
  if (!object.is_object())
    throw ConfigError(origins.where(path), ": ", path, ": found ", describe_value(object),
                      "; expected a section {…}");
  state_->path = std::move(path);
  state_->origins = std::move(origins);
  state_->object = object;
  state_->resolved = object;
}

const nlohmann::json* Section::find(const std::string& name, const nlohmann::json& fallback) const {
  state_->read.insert(name);
  const auto it = state_->object.find(name);
  if (it != state_->object.end()) return &*it;
  state_->resolved[name] = fallback;
  return nullptr;
}

bool Section::has(const std::string& name) const { return state_->object.contains(name); }

template <class T>
T Section::get(const Key& key, const T& fallback) const {
  const nlohmann::json* value = find(key.path, fallback);
  if (!value) return fallback;
  const std::string wrong = mismatch(key, *value);
  if (wrong.empty()) return value->get<T>();  // for int64_t, 5e8 is 500000000
  note(key.path, wrong);
  return fallback;
}

template <class T>
std::vector<T> Section::get_list(const Key& item, const std::vector<T>& fallback,
                                 const char* accepted_list) const {
  const nlohmann::json* value = find(item.path, fallback);
  if (!value) return fallback;
  std::string wrong;
  if (!value->is_array()) wrong = str("found ", describe_value(*value), "; expected ", accepted_list);
  for (size_t i = 0; wrong.empty() && i < value->size(); ++i) wrong = mismatch(item, (*value)[i]);
  if (wrong.empty()) return value->get<std::vector<T>>();
  note(item.path, wrong);
  return fallback;
}

template <class T>
T Section::require(const Key& key) const {
  state_->read.insert(key.path);
  const auto it = state_->object.find(key.path);
  if (it == state_->object.end()) fail(key.path, str("is missing; expected ", accepted(key)));
  if (const std::string wrong = mismatch(key, *it); !wrong.empty()) fail(key.path, wrong);
  return it->get<T>();
}

bool Section::boolean(const std::string& name, bool fallback) const {
  return get<bool>({.path = name, .type = Type::kBool}, fallback);
}
int64_t Section::integer(const std::string& name, int64_t fallback, int64_t min, int64_t max) const {
  return get<int64_t>(integer_key(name, min, max), fallback);
}
double Section::number(const std::string& name, double fallback, double min, double max) const {
  return get<double>(key_of(Type::kNumber, name, min, max), fallback);
}
std::string Section::text(const std::string& name, const std::string& fallback) const {
  return get<std::string>({.path = name, .type = Type::kText}, fallback);
}
std::string Section::choice(const std::string& name, const std::string& fallback,
                            const std::vector<std::string>& choices) const {
  const Key key{.path = name, .type = Type::kChoice, .choices = choices};
  const std::string written = get<std::string>(key, fallback);
  return written == fallback ? fallback : canonical_choice(key, written);
}
std::vector<int64_t> Section::integers(const std::string& name, const std::vector<int64_t>& fallback,
                                       int64_t min, int64_t max) const {
  return get_list<int64_t>(integer_key(name, min, max), fallback, "a list of integers");
}
std::vector<double> Section::numbers(const std::string& name, const std::vector<double>& fallback, double min,
                                     double max) const {
  return get_list<double>(key_of(Type::kNumber, name, min, max), fallback, "a list of numbers");
}
std::vector<std::string> Section::texts(const std::string& name,
                                        const std::vector<std::string>& fallback) const {
  return get_list<std::string>({.path = name, .type = Type::kText}, fallback, "a list of strings");
}
Section Section::section(const std::string& name) const {
  const nlohmann::json empty = nlohmann::json::object();
  const nlohmann::json* value = find(name, empty);
  return Section(value ? *value : empty, child_path(state_->path, name), state_->origins);
}

int64_t Section::required_integer(const std::string& name, int64_t min, int64_t max) const {
  return require<int64_t>(integer_key(name, min, max));
}
std::string Section::required_text(const std::string& name) const {
  return require<std::string>({.path = name, .type = Type::kText});
}

void Section::finish() const {
  const std::vector<std::string> known(state_->read.begin(), state_->read.end());
  for (const auto& [name, value] : state_->object.items())
    if (!state_->read.contains(name) && !name.starts_with('_') && !state_->problems.is_full())
      note(name, str("unknown key", did_you_mean(name, known), ", found ", describe_value(value),
                     "; expected ", expected_names(name, known, "")));
  std::exchange(state_->problems, {}).raise();
}

void Section::note(const std::string& name, const std::string& text) const {
  const std::string path = child_path(state_->path, name);
  state_->problems.add(state_->origins.message(path, text), state_->origins.order(path));
}

void Section::fail(const std::string& name, const std::string& text) const {
  note(name, text);
  std::exchange(state_->problems, {}).raise();
  throw ConfigError(text);  // not reached: one has been noted
}

const nlohmann::json& Section::json() const { return state_->object; }
const nlohmann::json& Section::resolved() const { return state_->resolved; }
const std::string& Section::path() const { return state_->path; }

}  // namespace tessera::config

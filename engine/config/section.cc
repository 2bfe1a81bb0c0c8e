#include "engine/config/section.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

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
  Problems problems;
};

Section::Section() : state_(std::make_shared<State>()) {}

Section::Section(const nlohmann::json& object, std::string path, Origins origins)
    : state_(std::make_shared<State>()) {
  state_->path = std::move(path);
  state_->origins = std::move(origins);
  if (!object.is_object())
    throw ConfigError(str(state_->origins.where(state_->path), ": ", state_->path, ": found ",
                          describe_value(object), "; expected a section {…}"));
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

bool Section::has(const std::string& name) const { return state_->object.contains(name); }

template <class T>
T Section::get(const Key& key, const T& fallback) const {
  const nlohmann::json* value = ask(key.path, fallback);
  if (!value) return fallback;
  const std::string wrong = mismatch(key, *value);
  if (wrong.empty()) return value->get<T>();  // for int64_t, 5e8 is 500000000
  note(key.path, wrong);
  return fallback;
}

template <class T>
std::vector<T> Section::get_list(const Key& item, const std::vector<T>& fallback,
                                 const char* accepted_list) const {
  const nlohmann::json* value = ask(item.path, fallback);
  if (!value) return fallback;
  std::string wrong =
      value->is_array() ? "" : str("found ", describe_value(*value), "; expected ", accepted_list);
  if (value->is_array())
    for (const nlohmann::json& element : *value)
      if (wrong.empty()) wrong = mismatch(item, element);
  if (wrong.empty()) return value->get<std::vector<T>>();
  note(item.path, wrong);
  return fallback;
}

bool Section::boolean(const std::string& name, bool fallback) const {
  return get<bool>(config::boolean(name), fallback);
}

int64_t Section::integer(const std::string& name, int64_t fallback, int64_t min, int64_t max) const {
  return get<int64_t>(config::integer(name).range(static_cast<double>(min), static_cast<double>(max)),
                      fallback);
}

double Section::number(const std::string& name, double fallback, double min, double max) const {
  return get<double>(config::number(name).range(min, max), fallback);
}

std::string Section::text(const std::string& name, const std::string& fallback) const {
  return get<std::string>(config::text(name), fallback);
}

std::string Section::word(const std::string& name, const std::string& fallback,
                          const std::vector<std::string>& words) const {
  const Key key = config::word(name, words);
  const std::string written = get<std::string>(key, fallback);
  return has(name) && written != fallback ? canonical_word(key, written) : written;
}

std::vector<int64_t> Section::integers(const std::string& name, const std::vector<int64_t>& fallback,
                                       int64_t min, int64_t max) const {
  return get_list<int64_t>(config::integer(name).range(static_cast<double>(min), static_cast<double>(max)),
                           fallback, "a list of integers");
}

std::vector<double> Section::numbers(const std::string& name, const std::vector<double>& fallback, double min,
                                     double max) const {
  return get_list<double>(config::number(name).range(min, max), fallback, "a list of numbers");
}

std::vector<std::string> Section::texts(const std::string& name,
                                        const std::vector<std::string>& fallback) const {
  return get_list<std::string>(config::text(name), fallback, "a list of strings");
}

Section Section::section(const std::string& name) const {
  static const nlohmann::json kEmpty = nlohmann::json::object();
  const auto* value = ask(name, kEmpty);
  return Section(value ? *value : kEmpty, child_path(state_->path, name), state_->origins);
}

template <class T>
T Section::require(const Key& key) const {
  state_->asked.insert(key.path);
  const auto it = state_->object.find(key.path);
  if (it == state_->object.end()) fail(key.path, str("is missing; expected ", accepted(key)));
  if (const std::string wrong = mismatch(key, *it); !wrong.empty()) fail(key.path, wrong);
  return it->get<T>();
}

int64_t Section::required_integer(const std::string& name, int64_t min, int64_t max) const {
  return require<int64_t>(config::integer(name).range(static_cast<double>(min), static_cast<double>(max)));
}
double Section::required_number(const std::string& name, double min, double max) const {
  return require<double>(config::number(name).range(min, max));
}
std::string Section::required_text(const std::string& name) const {
  return require<std::string>(config::text(name));
}

void Section::finish() const {
  const std::vector<std::string> known(state_->asked.begin(), state_->asked.end());
  Problems problems = std::exchange(state_->problems, {});
  for (const auto& [name, value] : state_->object.items()) {
    if (state_->asked.count(name)) continue;
    const std::string path = child_path(state_->path, name);
    problems.add(message(path, str("unknown key", did_you_mean(name, known), ", found ",
                                   describe_value(value), "; expected ", expected_names(name, known, ""))),
                 state_->origins.order(path));
  }
  problems.raise();
}

std::string Section::message(const std::string& path, const std::string& text) const {
  return str(state_->origins.where(path), ": ", printable(path), ": ", text);
}

void Section::note(const std::string& name, const std::string& text) const {
  const std::string path = child_path(state_->path, name);
  state_->problems.add(message(path, text), state_->origins.order(path));
}

void Section::fail(const std::string& name, const std::string& text) const {
  note(name, text);
  const Problems problems = std::exchange(state_->problems, {});
  problems.raise();
  throw ConfigError(text);  // not reached: one has been noted
}

const nlohmann::json& Section::json() const { return state_->object; }
const nlohmann::json& Section::resolved() const { return state_->resolved; }
const std::string& Section::path() const { return state_->path; }

}  // namespace tessera::config

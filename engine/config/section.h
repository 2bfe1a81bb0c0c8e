// Section: reads one free-form object (model, data, and sections in them) as strictly as the key tables read
// the rest: every getter checks type and range, and finish() refuses keys that no getter was called for.
//
//   config::Section options = run.model;              // {"type": "mlp", "hidden": 128, "dropout": 0.1}
//   int64_t hidden = options.integer("hidden", 256, 1, 65536);
//   double dropout = options.number("dropout", 0.0, 0.0, 1.0);
//   options.finish();                                 // "ds.json:7: model.hiden: unknown key (did you …"
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/config/document/document.h"

namespace tessera::config {

struct Key;

/// Reads the values of one object of the configuration. A value: copies share which keys have been read. Not
/// thread-safe. When a value has another type or is out of range (both ends included), the getter notes the
/// error and returns its fallback; finish() throws all errors together. Values must not be used before
/// finish().
class Section {
 public:
  Section();  ///< an empty section
  Section(const nlohmann::json& object, std::string path, Origins origins);

  bool has(const std::string& name) const;

  bool boolean(const std::string& name, bool fallback) const;
  int64_t integer(const std::string& name, int64_t fallback, int64_t min, int64_t max) const;
  double number(const std::string& name, double fallback, double min, double max) const;
  std::string text(const std::string& name, const std::string& fallback) const;
  /// One of `choices`, ignoring case; returned in the spelling of `choices`.
  std::string choice(const std::string& name, const std::string& fallback,
                     const std::vector<std::string>& choices) const;
  std::vector<int64_t> integers(const std::string& name, const std::vector<int64_t>& fallback, int64_t min,
                                int64_t max) const;
  std::vector<double> numbers(const std::string& name, const std::vector<double>& fallback, double min,
                              double max) const;
  std::vector<std::string> texts(const std::string& name, const std::vector<std::string>& fallback) const;
  /// A section inside this one; empty when it is absent. Has its own finish().
  Section section(const std::string& name) const;

  /// The same for keys without a default: one that is absent or wrong is thrown at once, as by fail().
  int64_t required_integer(const std::string& name, int64_t min, int64_t max) const;
  std::string required_text(const std::string& name) const;

  /// Throws ConfigError "<file>:<line>: <path>: …", a line for each error: those that getters have noted, and
  /// keys that no getter was called for, with the nearest name that one was called for. A name that begins
  /// with _ is a comment.
  void finish() const;

  /// Throws ConfigError about one of this section's keys, for checks of the caller's own, together with the
  /// errors noted before.
  [[noreturn]] void fail(const std::string& name, const std::string& text) const;

  /// The section as it is written.
  const nlohmann::json& json() const;
  /// The section with every key that has been read filled in.
  const nlohmann::json& resolved() const;
  const std::string& path() const;

 private:
  struct State;
  template <class T>
  T get(const Key& key, const T& fallback) const;
  template <class T>
  std::vector<T> get_list(const Key& item, const std::vector<T>& fallback, const char* accepted_list) const;
  template <class T>
  T require(const Key& key) const;
  void note(const std::string& name, const std::string& text) const;
  const nlohmann::json* find(const std::string& name, const nlohmann::json& fallback) const;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::config

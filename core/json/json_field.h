// JsonField: a value of a parsed JSON document together with its path, for error messages. For untrusted
// documents: every access checks type and range.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tessera {

/// Refers to the document, its source and its parent, all of which must outlive it. Members throw the error
/// that of() was called for: "DIR/manifest.json: files[1].bytes: found "x"; expected an integer from 0 to 9".
class JsonField {
 public:
  /// The document itself: JsonField::of<CheckpointError>(document, "DIR/manifest.json").
  template <class E>
  static JsonField of(const nlohmann::json& document, const std::string& source) {
    return {document, source, [](const std::string& message) { throw E(message); }};
  }

  const nlohmann::json& value() const { return *value_; }

  /// Checks for an object with exactly these keys.
  void expect_keys(std::initializer_list<std::string_view> keys) const;
  /// A member of an object.
  JsonField operator[](std::string_view key) const;
  /// Calls `each` for the elements of a list, in order.
  void for_each(const std::function<void(const JsonField&)>& each) const;
  size_t list_size() const;

  int64_t integer(int64_t least, int64_t greatest = std::numeric_limits<int64_t>::max()) const;
  double number() const;
  bool boolean() const;
  /// Text without NUL, at most `max_bytes` long; empty only where allowed.
  const std::string& text(size_t max_bytes = 4096, bool may_be_empty = false) const;

  /// Throws; `expected` ends the sentence "found …; expected …".
  [[noreturn]] void fail(std::string_view expected) const;
  /// Throws with this text after the path.
  [[noreturn]] void complain(std::string_view sentence) const;

 private:
  using Throw = void (*)(const std::string& message);
  JsonField(const nlohmann::json& document, const std::string& source, Throw raise)
      : value_(&document), source_(&source), raise_(raise) {}
  JsonField(const nlohmann::json& value, const JsonField& parent, std::string_view key, size_t index)
      : value_(&value),
        source_(parent.source_),
        raise_(parent.raise_),
        parent_(&parent),
        key_(key),
        index_(index) {}
  std::string path() const;

  const nlohmann::json* value_;
  const std::string* source_;
  Throw raise_;
  const JsonField* parent_ = nullptr;  // the path is built only for an error
  std::string_view key_;               // empty for an element of a list
  size_t index_ = 0;
};

}  // namespace tessera

// JsonField: a value of a parsed JSON document that knows where it stands, so that a wrong one has a name.
// For documents that are not to be trusted: every access says what it expects.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::checkpoint {

inline constexpr int kMaxJsonDepth = 64;

/// Local. Parses JSON text: no comments, no key twice in an object, at most kMaxJsonDepth levels. Throws
/// CheckpointError naming `source` and the byte.
nlohmann::json parse_json(std::string_view text, const std::string& source);

/// Refers to the document, its source and its parent, all of which must outlive it.
/// Members throw CheckpointError: "DIR/manifest.json: files[1].bytes: found "x" (a
/// string); expected an integer from 0 to 9".
class JsonField {
 public:
  JsonField(const nlohmann::json& document, const std::string& source)
      : value_(&document), source_(&source) {}

  const nlohmann::json& value() const { return *value_; }

  /// An object with just these keys, each there.
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
  /// Throws with a sentence of its own.
  [[noreturn]] void complain(std::string_view sentence) const;

 private:
  JsonField(const nlohmann::json& value, const JsonField& parent, std::string_view key, size_t index)
      : value_(&value), source_(parent.source_), parent_(&parent), key_(key), index_(index) {}
  std::string path() const;

  const nlohmann::json* value_;
  const std::string* source_;
  const JsonField* parent_ = nullptr;  // paths are built when they are needed: documents are long, errors few
  std::string_view key_;               // empty for an element of a list
  size_t index_ = 0;
};

}  // namespace tessera::checkpoint

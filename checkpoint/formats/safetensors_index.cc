#include "checkpoint/formats/safetensors_index.h"

#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kWeightMap = "weight_map";

// Builds the map from the parser's events and skips everything but the weight_map. Every handler throws or
// returns true.
class IndexReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit IndexReader(const std::string& file) : file_(file) {}

  std::map<std::string, std::string> take() {
    if (!seen_) fail("has no \"weight_map\"; expected {\"weight_map\": {NAME: FILE}}");
    return std::move(files_);
  }

  bool start_object(std::size_t) override {
    if (depth_ == 1 && at_weight_map_) {
      in_weight_map_ = true;
    } else if (depth_ > 0) {
      value("an object");
    }
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    if (depth_ == 1) in_weight_map_ = false;
    return true;
  }
  bool start_array(std::size_t) override {
    value("a list");
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }

  bool key(string_t& name) override {
    if (depth_ == 1) {
      at_weight_map_ = name == kWeightMap;
      if (at_weight_map_ && seen_) fail("has \"weight_map\" twice");
      seen_ = seen_ || at_weight_map_;
    } else if (in_weight_map_) {
      name_ = name;
    }
    return true;
  }

  bool string(string_t& text) override {
    if (!in_weight_map_) return value(quoted_name(text));
    const bool is_name = !text.empty() && text != "." && text != ".." &&
                         text.find_first_of(std::string_view("/\\\0", 3)) == text.npos;
    if (!is_name)
      fail(str("tensor ", quoted_name(name_), " is in ", quoted_name(text),
               ", expected a file in the index's own folder"));
    if (!files_.emplace(std::move(name_), text).second)
      fail(str("has a tensor twice, in ", quoted_name(text), " the second time"));
    return true;
  }

  bool number_unsigned(number_unsigned_t number) override { return value(str(number)); }
  bool number_integer(number_integer_t number) override { return value(str(number)); }
  bool number_float(number_float_t, const string_t& text) override { return value(quoted_name(text)); }
  bool boolean(bool flag) override { return value(flag ? "true" : "false"); }
  bool null() override { return value("null"); }
  bool binary(binary_t&) override { return value("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail(str("is no JSON at byte ", position));
  }

 private:
  // A value other than the weight_map and the names of files in it.
  bool value(const std::string& found) {
    if (depth_ == 0) fail(str("is ", found, ", expected an object"));
    if (in_weight_map_)
      fail(str("tensor ", quoted_name(name_), " is in ", found, ", expected the name of a file"));
    if (depth_ == 1 && at_weight_map_) fail(str("\"weight_map\" is ", found, ", expected an object"));
    return true;
  }

  [[noreturn]] void fail(const std::string& what) { throw CheckpointError(str(file_, ": ", what)); }

  const std::string& file_;
  std::map<std::string, std::string> files_;
  int64_t depth_ = 0;           // objects and lists that are open
  bool at_weight_map_ = false;  // the last key of the outermost object was it
  bool in_weight_map_ = false;
  bool seen_ = false;
  std::string name_;
};

}  // namespace

std::map<std::string, std::string> parse_safetensors_index(std::string_view text, const std::string& file) {
  IndexReader reader(file);
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  return reader.take();
}

}  // namespace tessera::checkpoint

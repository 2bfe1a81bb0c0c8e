#include "core/json/json_field.h"

#include <algorithm>

#include "core/json/json_reader.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera {
namespace {

using nlohmann::json;

std::string describe(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return str("a list of ", value.size());
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "…";
  return text;
}

}  // namespace

std::string JsonField::path() const {
  if (parent_ == nullptr) return "";
  return key_.empty() ? child_path(parent_->path(), index_) : child_path(parent_->path(), key_);
}

void JsonField::complain(std::string_view sentence) const {
  const std::string where = abridged(path());
  raise_(str(*source_, ": ", where, where.empty() ? "" : ": ", sentence));
  throw std::logic_error("an error that was not thrown");
}

void JsonField::fail(std::string_view expected) const {
  complain(str("found ", describe(*value_), "; expected ", expected));
}

void JsonField::expect_keys(std::initializer_list<std::string_view> keys) const {
  if (!value_->is_object()) fail("an object");
  for (std::string_view key : keys)
    if (!value_->contains(key)) complain(str("\"", key, "\" is missing"));
  for (const auto& [key, unused] : value_->items())
    if (std::find(keys.begin(), keys.end(), key) == keys.end())
      complain(str("unknown key ", describe(json(key))));
}

JsonField JsonField::operator[](std::string_view key) const {
  if (!value_->is_object()) fail("an object");
  const auto found = value_->find(key);
  if (found == value_->end()) complain(str("\"", key, "\" is missing"));
  return {*found, *this, key, 0};
}

void JsonField::for_each(const std::function<void(const JsonField&)>& each) const {
  const size_t size = list_size();
  for (size_t i = 0; i < size; ++i) each({(*value_)[i], *this, {}, i});
}

size_t JsonField::list_size() const {
  if (!value_->is_array()) fail("a list");
  return value_->size();
}

int64_t JsonField::integer(int64_t least, int64_t greatest) const {
  const bool fits =
      value_->is_number_unsigned()
          ? value_->get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
          : value_->is_number_integer();
  const int64_t number = fits ? value_->get<int64_t>() : 0;
  if (!fits || number < least || number > greatest) fail(str("an integer from ", least, " to ", greatest));
  return number;
}

double JsonField::number() const {
  if (!value_->is_number()) fail("a number");
  return value_->get<double>();
}

bool JsonField::boolean() const {
  if (!value_->is_boolean()) fail("true or false");
  return value_->get<bool>();
}

const std::string& JsonField::text(size_t max_bytes, bool may_be_empty) const {
  if (!value_->is_string()) fail("a string");
  const std::string& text = value_->get_ref<const std::string&>();
  if (text.size() > max_bytes || (text.empty() && !may_be_empty) || text.find('\0') != std::string::npos)
    fail(str("a string of ", may_be_empty ? 0 : 1, " to ", max_bytes, " bytes without NUL"));
  return text;
}

}  // namespace tessera

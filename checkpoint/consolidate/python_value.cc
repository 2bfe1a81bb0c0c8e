#include "checkpoint/consolidate/python_value.h"

#include <cstdint>
#include <limits>
#include <string_view>

#include "checkpoint/value_tag.h"
#include "core/check.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

/// The type that an object names; empty: it is a plain dict.
std::string_view type_of(const json& value) {
  const auto found = value.find(kValueTag);
  return found != value.end() && found->is_string() ? found->get_ref<const std::string&>()
                                                    : std::string_view();
}

bool is_sequence(std::string_view type) {
  return type == "tuple" || type == "set" || type == "frozenset" || type == "Size";
}
bool is_mapping(std::string_view type) {
  return type == "dict" || type == "OrderedDict" || type == "Counter";
}

/// The list that a tagged value must have under a key; null where it has none.
const json* list_in(const json& value, const char* key) {
  const auto found = value.find(key);
  return found != value.end() && found->is_array() ? &*found : nullptr;
}

bool is_number_text(const json& value) {
  const auto found = value.find("value");
  return found != value.end() && found->is_string() &&
         (*found == "nan" || *found == "inf" || *found == "-inf");
}

double number_of(const std::string& text) {
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  return text == "inf" ? infinity : -infinity;
}

void write_items(PickleWriter& pickle, const json& list) {
  for (const json& item : list) write_value(pickle, item);
}

void write_tagged(PickleWriter& pickle, std::string_view type, const json& value) {
  if (type == "float") {
    pickle.number(number_of(value["value"]));
  } else if (type == "dtype") {
    pickle.global("torch", value["value"].get_ref<const std::string&>());
  } else if (is_mapping(type)) {
    if (type == "Counter") pickle.global("collections", "Counter").begin_tuple();
    type == "OrderedDict" ? pickle.begin_ordered_dict() : pickle.begin_dict();
    for (const json& pair : value["items"]) write_items(pickle, pair);
    pickle.end_dict();
    if (type == "Counter") pickle.end_tuple().call();
  } else if (type == "tuple") {
    pickle.begin_tuple();
    write_items(pickle, value["value"]);
    pickle.end_tuple();
  } else {  // a class that is called with a list
    type == "Size" ? pickle.global("torch", "Size") : pickle.global("builtins", type);
    pickle.begin_tuple().begin_list();
    write_items(pickle, value["value"]);
    pickle.end_list().end_tuple().call();
  }
}

std::string unwritable_tagged(std::string_view type, const json& value) {
  const std::string whole = str("a value of type ", type);
  if (type == "float") return is_number_text(value) ? "" : whole;
  if (type == "dtype") {
    const auto name = value.find("value");
    const bool is_name = name != value.end() && name->is_string() &&
                         name->get_ref<const std::string&>().find_first_not_of(
                             "abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos;
    return is_name ? "" : whole;
  }
  const json* const list = is_sequence(type)  ? list_in(value, "value")
                           : is_mapping(type) ? list_in(value, "items")
                                              : nullptr;
  if (list == nullptr) return whole;
  for (const json& item : *list) {
    if (is_mapping(type) && (!item.is_array() || item.size() != 2)) return whole;
    if (std::string found = unwritable(item); !found.empty()) return found;
  }
  return "";
}

}  // namespace

std::string unwritable(const json& value) {
  if (value.is_object() && !type_of(value).empty()) return unwritable_tagged(type_of(value), value);
  if (value.is_structured())
    for (const json& item : value)
      if (std::string found = unwritable(item); !found.empty()) return found;
  if (value.is_number_unsigned() && value.get<uint64_t>() > std::numeric_limits<int64_t>::max())
    return "an integer of more than 63 bits";
  return value.is_binary() || value.is_discarded() ? "a value of no known type" : "";
}

void write_value(PickleWriter& pickle, const json& value) {
  switch (value.type()) {
    case json::value_t::null: pickle.none(); return;
    case json::value_t::boolean: pickle.boolean(value.get<bool>()); return;
    case json::value_t::number_integer:
    case json::value_t::number_unsigned: pickle.integer(value.get<int64_t>()); return;
    case json::value_t::number_float: pickle.number(value.get<double>()); return;
    case json::value_t::string: pickle.text(value.get_ref<const std::string&>()); return;
    case json::value_t::array:
      pickle.begin_list();
      write_items(pickle, value);
      pickle.end_list();
      return;
    case json::value_t::object:
      if (const std::string_view type = type_of(value); !type.empty()) {
        write_tagged(pickle, type, value);
        return;
      }
      pickle.begin_dict();
      for (const auto& [key, item] : value.items()) {
        pickle.text(key);
        write_value(pickle, item);
      }
      pickle.end_dict();
      return;
    default: TESSERA_CHECK(false, "a value that unwritable() refuses");
  }
}

}  // namespace tessera::checkpoint

#include "checkpoint/formats/pickle.h"
#include "checkpoint/formats/pickle_text.h"
#include "core/str.h"

namespace tessera::checkpoint {

std::string_view PickleValue::global() const {
  if (kind == Kind::kGlobal) return text;
  return kind == Kind::kObject && callable != nullptr ? callable->text : std::string_view();
}

const PickleValue* PickleValue::find(std::string_view key) const {
  const auto in_dict = [&](const PickleValue* dict) -> const PickleValue* {
    if (dict == nullptr || (dict->kind != Kind::kDict && !dict->pairs)) return nullptr;
    for (size_t i = 0; i + 1 < dict->items.size(); i += 2)
      if (dict->items[i]->kind == Kind::kString && dict->items[i]->text == key) return dict->items[i + 1];
    return nullptr;
  };
  if (kind == Kind::kDict) return in_dict(this);
  if (kind != Kind::kObject) return nullptr;
  if (const PickleValue* value = in_dict(state)) return value;
  if (state != nullptr && state->kind == Kind::kTuple && state->items.size() == 2)
    for (const PickleValue* part : state->items)
      if (part->kind == Kind::kDict)
        if (const PickleValue* value = in_dict(part)) return value;
  return in_dict(this);
}

std::string PickleValue::describe() const {
  const size_t count = items.size();
  switch (kind) {
    case Kind::kNone: return "None";
    case Kind::kBool: return integer != 0 ? "True" : "False";
    case Kind::kInt: return std::to_string(integer);
    case Kind::kLong: return shown_text(text);
    case Kind::kFloat: return str(number);
    case Kind::kString: return str("the text '", shown_text(text), "'");
    case Kind::kBytes: return str(text.size(), " bytes");
    case Kind::kList: return str("a list of ", count);
    case Kind::kTuple: return str("a tuple of ", count);
    case Kind::kSet: return str("a set of ", count);
    case Kind::kDict: return str("a dict of ", count / 2);
    case Kind::kGlobal: return str("the name ", shown_text(text));
    case Kind::kObject: return shown_text(global());
    case Kind::kPersistent: return "a persistent id";
  }
  return "a value";
}

}  // namespace tessera::checkpoint

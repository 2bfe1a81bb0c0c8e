#include "engine/inputs.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

namespace tessera {

c10::IValue convert_tensors(const c10::IValue& value, const TensorConversion& convert) {
  if (value.isTensor()) return convert_tensors(value.toTensor(), convert);
  if (value.isList()) {
    const c10::List<c10::IValue> list = value.toList();
    c10::List<c10::IValue> converted = list.copy();
    for (size_t i = 0; i < list.size(); ++i) converted.set(i, convert_tensors(list.get(i), convert));
    return converted;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> converted;
    for (const c10::IValue& item : value.toTupleRef().elements())
      converted.push_back(convert_tensors(item, convert));
    return c10::ivalue::Tuple::createNamed(std::move(converted), value.type());
  }
  if (value.isGenericDict()) {
    c10::Dict<c10::IValue, c10::IValue> converted = value.toGenericDict().copy();
    for (const auto& entry : value.toGenericDict())
      converted.insert_or_assign(entry.key(), convert_tensors(entry.value(), convert));
    return converted;
  }
  return value;
}

}  // namespace tessera

// convert_tensors: a copy of a forward() argument with every tensor in it converted. The argument is a
// tensor, an optional, vector, pair, tuple or map of tensors, or a c10::IValue. For moving a batch to the
// model's device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {

using TensorConversion = std::function<at::Tensor(const at::Tensor&)>;

/// Whether a T can hold tensors that convert_tensors finds.
template <class T>
struct HoldsTensors : std::false_type {};
template <>
struct HoldsTensors<at::Tensor> : std::true_type {};
template <>
struct HoldsTensors<c10::IValue> : std::true_type {};
template <class T>
struct HoldsTensors<std::optional<T>> : HoldsTensors<T> {};
template <class T, class Allocator>
struct HoldsTensors<std::vector<T, Allocator>> : HoldsTensors<T> {};
template <class First, class Second>
struct HoldsTensors<std::pair<First, Second>> : std::disjunction<HoldsTensors<First>, HoldsTensors<Second>> {
};
template <class... Ts>
struct HoldsTensors<std::tuple<Ts...>> : std::disjunction<HoldsTensors<Ts>...> {};
template <class Key, class T, class Less, class Allocator>
struct HoldsTensors<std::map<Key, T, Less, Allocator>> : HoldsTensors<T> {};
template <class Key, class T, class Hash, class Equal, class Allocator>
struct HoldsTensors<std::unordered_map<Key, T, Hash, Equal, Allocator>> : HoldsTensors<T> {};

/// Converts inside lists, tuples and dictionaries, but not inside objects.
c10::IValue convert_tensors(const c10::IValue& value, const TensorConversion& convert);

template <class T>
T convert_tensors(const T& value, const TensorConversion& convert) {
  if constexpr (!HoldsTensors<T>::value) {
    return value;
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    return value.defined() ? convert(value) : value;
  } else if constexpr (requires { value.has_value(); }) {
    return value ? T(convert_tensors(*value, convert)) : T();
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    return std::apply([&](const auto&... items) { return T(convert_tensors(items, convert)...); }, value);
  } else {
    T converted = value;
    for (auto& item : converted) {
      if constexpr (requires { typename T::mapped_type; }) {
        item.second = convert_tensors(item.second, convert);
      } else {
        item = convert_tensors(item, convert);
      }
    }
    return converted;
  }
}

}  // namespace tessera

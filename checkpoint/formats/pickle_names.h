// What a pickle may call: the names that are data. For pickle.cc only, where [Note: what a pickle may name]
// says why.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

/// "module.name", with the words of Python 3 for those of Python 2.
std::string modern_name(std::string_view module, std::string_view name);

enum class PickleCall : uint8_t {
  kCall,   ///< any callable with arguments: REDUCE, OBJ
  kClass,  ///< a class, whose __new__ is called: NEWOBJ, NEWOBJ_EX
};

/// Whether what has this name, "module.name" with the words of Python 3, makes data when it is called.
bool is_data_call(std::string_view name, PickleCall call);

/// Whether the name may be that of an enum's class, whose members are data.
bool is_enum_class(std::string_view name);

/// Whether it can be a name of Python's that is looked up in a class: no "__class__".
bool is_plain_attribute(std::string_view name);

}  // namespace tessera::checkpoint

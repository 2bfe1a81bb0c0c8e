// Names of files, from the names of a run's numbers, pictures and texts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "core/str.h"

namespace tessera {

/// "val_mask" for "val" and "mask" with a line break, or NUL, between.
inline std::string without_line_breaks(std::string name) {
  std::replace_if(name.begin(), name.end(), [](char c) { return c == '\n' || c == '\r' || c == '\0'; }, '_');
  return name;
}

/// "val_mask" for val/mask and "val mask", without line breaks.
inline std::string file_name_of(std::string name) {
  std::replace_if(name.begin(), name.end(), [](char c) { return c == '/' || c == ' '; }, '_');
  return without_line_breaks(std::move(name));
}

/// "images/val_mask_300.png" for "images", val/mask at step 300 and ".png".
inline std::string step_file(std::string_view folder, const std::string& name, int64_t step,
                             std::string_view ending) {
  return str(folder, "/", file_name_of(name), "_", step, ending);
}

}  // namespace tessera

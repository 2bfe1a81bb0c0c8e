// Reads what our writers make of a model: one safetensors file, or several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/formats/safetensors.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

/// A safetensors file, or all of a folder or of an index's folder, by the names of tensors.
class SafetensorsModel {
 public:
  explicit SafetensorsModel(const std::filesystem::path& path) {
    const bool is_index = path.extension() == ".json";
    if (!is_index && !std::filesystem::is_directory(path)) {
      files_.emplace_back(path);
    } else {
      for (const std::filesystem::path& file : paths_in(is_index ? path.parent_path() : path))
        if (file.extension() == ".safetensors") files_.emplace_back(file);
    }
    for (const SafetensorsFile& file : files_)
      for (const SafetensorsTensor& tensor : file.tensors()) places_.emplace(tensor.name, &file);
  }

  const std::deque<SafetensorsFile>& files() const { return files_; }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, file] : places_) names.push_back(name);
    return names;
  }
  const SafetensorsTensor* find(const std::string& name) const { return places_.at(name)->find(name); }
  void read(const std::string& name, int64_t begin, std::span<std::byte> destination) const {
    places_.at(name)->read_at(find(name)->offset + begin, destination);
  }

 private:
  std::deque<SafetensorsFile> files_;
  std::map<std::string, const SafetensorsFile*> places_;
};

}  // namespace tessera::checkpoint

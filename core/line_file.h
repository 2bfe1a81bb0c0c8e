// LineFile: a text file that grows line by line, and that a resumed run goes on with.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

namespace tessera {

/// Owns the open file. Not thread-safe. Members throw DiskError naming the file.
class LineFile {
 public:
  /// Local. Starts the file anew; with `keep`, with those of the lines it had that `keep` is true
  /// for (without their end of line, "\n").
  LineFile(std::filesystem::path path, const std::function<bool(const std::string& line)>& keep);

  /// Local. Nothing was kept.
  bool is_new() const { return is_new_; }
  /// Local. Appends `line` and "\n", and hands it to the system at once, so
  /// that a killed run keeps what it wrote.
  void append(const std::string& line);

 private:
  std::filesystem::path path_;
  std::ofstream out_;
  bool is_new_ = true;
};

}  // namespace tessera

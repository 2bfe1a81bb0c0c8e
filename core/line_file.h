// LineFile: a text file to which lines are appended, also by a resumed run.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

namespace tessera {

/// Owns the open file. Not thread-safe. Members throw DiskError naming the file.
class LineFile {
 public:
  /// Local. Creates or truncates the file; with `keep`, retains the lines for which keep(line without "\n")
  /// is true.
  LineFile(std::filesystem::path path, const std::function<bool(const std::string& line)>& keep);

  /// Local. No line was retained.
  bool is_new() const { return is_new_; }
  /// Local. Writes `line` and "\n" without buffering, so that a killed run loses no line.
  void append(const std::string& line);

 private:
  std::filesystem::path path_;
  std::ofstream out_;
  bool is_new_ = true;
};

}  // namespace tessera

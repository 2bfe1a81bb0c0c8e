// LineFile: a text file to which lines are appended, also by a resumed run.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

namespace tessera {

/// Appends lines to a file. Owns the open file. Not thread-safe. Members throw DiskError naming the file.
class LineFile {
 public:
  using Test = std::function<bool(const std::string& line)>;  ///< of a line without "\n"
  /// Creates or truncates the file; with `keep`, retains the lines for which it is true. With
  /// `readable`: where that is false of a line, or the last line has no end, the file as it was is kept
  /// beside this one, and damage() says so.
  LineFile(std::filesystem::path path, const Test& keep, const Test& readable = {});

  /// No line was retained.
  bool is_new() const { return is_new_; }
  /// One line for the user: which lines could not be read, and where they are now. Empty: none.
  const std::string& damage() const { return damage_; }
  /// Writes `line` and "\n" without buffering, so that a killed run loses no line.
  void append(const std::string& line);

 private:
  std::filesystem::path path_;
  std::ofstream out_;
  bool is_new_ = true;
  std::string damage_;
};

}  // namespace tessera

// Texts with labels, read from files. Without libtorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::examples {

/// Texts and the index of each text's label.
struct LabelledTexts {
  std::vector<std::string> texts;
  std::vector<int64_t> labels;
  int64_t size() const { return static_cast<int64_t>(texts.size()); }
};

/// `path` is a folder with a file LABEL.txt for each label, one text per line, or a file with lines
/// "label<TAB>text". Text is UTF-8; a byte order mark, white space around a text and empty lines are
/// skipped. Texts are in the order of labels, then of lines. Throws DataError naming file and line if a file
/// cannot be read or has no text, if a line is not UTF-8 or has no tab, or if a label is not in `labels`.
LabelledTexts read_labelled_texts(const std::string& path, const std::vector<std::string>& labels);

/// Each text once, at its first position. Texts with several labels are left out.
LabelledTexts without_duplicates(const LabelledTexts& data);

}  // namespace tessera::examples

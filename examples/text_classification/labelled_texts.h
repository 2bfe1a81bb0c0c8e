// Texts with labels, read from files. Without libtorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::examples {

/// Texts and the number of each one's label. A value.
struct LabelledTexts {
  std::vector<std::string> texts;
  std::vector<int64_t> labels;
  int64_t size() const { return static_cast<int64_t>(texts.size()); }
};

/// Local. `path` is a folder with a file LABEL.txt for each label, a text a line, or a file with a line
/// "label<TAB>text" each. Text is UTF-8; a byte order mark, white space around a text and empty lines are
/// skipped. In the order of the labels, then of the lines. Throws DataError naming file and line: a file that
/// cannot be read or has no text, a line that is no UTF-8 or has no tab, a label that is none of `labels`.
LabelledTexts read_labelled_texts(const std::string& path, const std::vector<std::string>& labels);

/// Local. Each text once, at its first place. One that stands under several labels is left out.
LabelledTexts without_duplicates(const LabelledTexts& data);

}  // namespace tessera::examples

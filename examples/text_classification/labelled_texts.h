// Texts with labels, read from files, and their three parts. Without libtorch.
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

/// Local. `path` is a folder with a file LABEL.txt for each label, a text a line, or a file with a line "label<TAB>text" each.
/// Text is UTF-8; a byte order mark, white space around a text and empty lines are skipped. In the order of the labels, then of
/// the lines. Throws DataError naming file and line: a file that cannot be read or has no text, a line that is no UTF-8 or
/// has no tab, a label that is none of `labels`.
LabelledTexts read_labelled_texts(const std::string& path, const std::vector<std::string>& labels);

/// Local. Each text once, at its first place. One that stands under several labels is left out.
LabelledTexts without_duplicates(const LabelledTexts& data);

/// Samples of each part, by number.
struct Parts {
  std::vector<int64_t> train, validation, test;
};

struct PartsOptions {
  double validation_fraction = 0.1;
  double test_fraction = 0.1;
  uint64_t seed = 0;
};

/// Local. The numbers 0 .. size-1 in three parts, in a random order that is equal on every machine (train/sampler.h); fractions
/// are rounded down.
Parts split_into_parts(int64_t size, const PartsOptions& options);

}  // namespace tessera::examples

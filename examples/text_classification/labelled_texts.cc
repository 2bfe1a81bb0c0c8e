#include "examples/text_classification/labelled_texts.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::examples {
namespace {

namespace fs = std::filesystem;

/// Strips white space at both ends: ASCII's, no-break and ideographic spaces.
std::string_view trimmed(std::string_view text) {
  constexpr std::array<std::string_view, 8> kSpaces = {" ", "\t", "\r", "\n", "\v", "\f", "\u00a0", "\u3000"};
  for (bool found = true; std::exchange(found, false);)
    for (const std::string_view space : kSpaces) {
      for (; text.starts_with(space); found = true) text.remove_prefix(space.size());
      for (; text.ends_with(space); found = true) text.remove_suffix(space.size());
    }
  return text;
}

/// Calls `take(line, number)` for every line that is not empty; numbers count from 1. Throws DataError.
void for_each_line(const fs::path& path, const std::string& expected,
                   const std::function<void(std::string_view, int64_t)>& take) {
  const std::string bytes = read_data_file(path, expected);
  std::string_view rest = bytes;
  if (rest.substr(0, 3) == "\xef\xbb\xbf") rest.remove_prefix(3);
  bool found = false;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    if (!is_utf8(line)) throw DataError(path, ":", number, ": is not UTF-8; expected ", expected);
    if (trimmed(line).empty()) continue;
    take(line, number);
    found = true;
  }
  if (!found) throw DataError(path, ": has no text; expected ", expected);
}

LabelledTexts read_folder(const fs::path& folder, const std::vector<std::string>& labels) {
  LabelledTexts data;
  for (size_t label = 0; label < labels.size(); ++label) {
    for_each_line(folder / (labels[label] + ".txt"),
                  str("UTF-8 text, a sample of the label ", quoted_name(labels[label]), " a line"),
                  [&](std::string_view line, int64_t) {
                    data.texts.emplace_back(trimmed(line));
                    data.labels.push_back(static_cast<int64_t>(label));
                  });
  }
  return data;
}

LabelledTexts read_table(const fs::path& path, const std::vector<std::string>& labels) {
  std::vector<LabelledTexts> by_label(labels.size());
  for_each_line(
      path, "UTF-8 text, a line \"label<TAB>text\" a sample", [&](std::string_view line, int64_t number) {
        const auto fail = [&](const std::string& found, const std::string& expected) {
          throw DataError(path, ":", number, ": ", found, "; expected ", expected);
        };
        const size_t tab = line.find('\t');
        if (tab == std::string_view::npos) fail("has no tab", "\"label<TAB>text\"");
        const auto label = std::find(labels.begin(), labels.end(), trimmed(line.substr(0, tab)));
        if (label == labels.end())
          fail("the label is " + quoted_name(trimmed(line.substr(0, tab))), "one of " + join(labels, ", "));
        const std::string_view text = trimmed(line.substr(tab + 1));
        if (text.empty()) fail("has no text behind its label", "\"label<TAB>text\"");
        by_label[static_cast<size_t>(label - labels.begin())].texts.emplace_back(text);
      });
  LabelledTexts data;
  for (size_t label = 0; label < labels.size(); ++label)
    for (std::string& text : by_label[label].texts) {
      data.texts.push_back(std::move(text));
      data.labels.push_back(static_cast<int64_t>(label));
    }
  return data;
}

}  // namespace

LabelledTexts read_labelled_texts(const std::string& path, const std::vector<std::string>& labels) {
  std::error_code ignored;
  if (!fs::exists(path, ignored))
    throw DataError(path, ": not found; data.path must be a folder with ", join(labels, ".txt, "),
                    ".txt, or a file of lines \"label<TAB>text\" (`make data` brings data/reviews)");
  return fs::is_directory(path, ignored) ? read_folder(path, labels) : read_table(path, labels);
}

LabelledTexts without_duplicates(const LabelledTexts& data) {
  constexpr int64_t kSeveral = -1;
  std::unordered_map<std::string_view, int64_t> label_of;
  for (size_t i = 0; i < data.texts.size(); ++i) {
    const auto [place, is_new] = label_of.emplace(data.texts[i], data.labels[i]);
    if (!is_new && place->second != data.labels[i]) place->second = kSeveral;
  }
  LabelledTexts kept;
  for (size_t i = 0; i < data.texts.size(); ++i) {
    const auto place = label_of.find(data.texts[i]);
    if (place == label_of.end() || place->second == kSeveral) continue;
    kept.texts.push_back(data.texts[i]);
    kept.labels.push_back(data.labels[i]);
    label_of.erase(place);
  }
  return kept;
}

}  // namespace tessera::examples

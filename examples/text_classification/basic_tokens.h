// Splits text into words and punctuation marks, as BERT's BasicTokenizer does. Without libtorch.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::examples {

/// Thread-safe. Words of `text`, which is UTF-8, as code points: control characters are dropped, white
/// space separates words, Chinese characters and punctuation marks are words of their own. `lower_case` also
/// removes accents and case (canonical decomposition without combining marks, then simple lower case).
/// Equal to Hugging Face's BertNormalizer and BertPreTokenizer.
std::vector<std::u32string> basic_tokens(std::string_view text, bool lower_case);

/// Thread-safe. Code points as UTF-8.
std::string to_utf8(std::u32string_view text);

}  // namespace tessera::examples

// Vocabulary: tokens and their ids, in a file like BERT's vocab.txt. Without libtorch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::examples {

/// A value: owns the tokens. [PAD], [UNK], [CLS] and [SEP] are among them. Reading it is thread-safe.
class Vocabulary {
 public:
  /// The tokens by number. Throws DataError naming `source` and the line (number + 1) for a token that
  /// is there twice or is empty, and for a special one that is missing.
  Vocabulary(std::vector<std::string> tokens, const std::string& source);
  /// A token a line, as `write` and Hugging Face's save_vocabulary leave them. Throws DataError for
  /// the above, and for a file that cannot be read or is not UTF-8.
  static Vocabulary read(const std::string& path);

  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
  const std::vector<std::string>& tokens() const { return tokens_; }
  /// The token's id; -1 if there is none.
  int32_t find(std::string_view token) const;
  int32_t pad() const { return pad_; }
  int32_t unknown() const { return unknown_; }
  int32_t cls() const { return cls_; }
  int32_t sep() const { return sep_; }
  /// The content of a vocab.txt.
  std::string text() const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> numbers_;
  int32_t pad_ = 0, unknown_ = 0, cls_ = 0, sep_ = 0;
};

}  // namespace tessera::examples

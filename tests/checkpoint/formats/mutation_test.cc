// Thousands of damaged pickles and files of torch.save, the same ones each time: each is refused with a
// message, or read, and then all its tensors lie in it. The fuzzers (tests/checkpoint/fuzz) find more; this
// runs always.
#include <gtest/gtest.h>

#include <random>

#include "tests/checkpoint/formats/torch_file_testing.h"

namespace tessera::checkpoint {
namespace {

constexpr int kMutants = 5000;  // of each kind of file

/// Pickles that have every opcode.
std::vector<std::string> seeds() {
  const std::string thing = name("m", "Thing");
  return {
      proto(small_tensor()),
      proto("}(" + text("model") + "}(" + text("a") + small_tensor() + text("b") + "G\x3f\xf0\0\0\0\0\0\0"s +
            "uu"),
      proto("}(" + text("a") + small_tensor() + text("lr") + "G\x3f\xf0\0\0\0\0\0\0"s + text("n") +
            "J\1\2\3\4u"s),
      proto(call(name("torch._utils", "_rebuild_parameter"), small_tensor() + "\x88}")),
      proto(call(name("torch._tensor", "_rebuild_from_type_v2"), name("torch._utils", "_rebuild_tensor_v2") +
                                                                     thing + "(" + storage(4) +
                                                                     "K\0K\4\x85K\1\x85\x89}t}"s)),
      proto(call(name("torch._utils", "_rebuild_tensor_v3"),
                 storage(16, "0", "UntypedStorage") + "K\0K\4\x85K\1\x85\x89}"s + name("torch", "float32"))),
      proto(thing + ")\x81}" + text("a") + "K\1sb\x94"),
      proto(thing + "N\x85}" + text("a") + "Ns\x92(" + text("k") + "Nu"),
      "\x80\x04\x95\x20\0\0\0\0\0\0\0]\x94(\x8c\1a\x94\x8a\x09\0\0\0\0\0\0\0\x80\0\x8f\x94(K\1K\2\x90(K\1\x91\x88\x89Ne."s,
      "\x80\x05\x96\3\0\0\0\0\0\0\0abc\x94\x8e\2\0\0\0\0\0\0\0ab\x8d\1\0\0\0\0\0\0\0xC\1bB\1\0\0\0c(NNt\x85\x86\x87."s,
      proto("(" + thing + "I140187732541696\no" + text("m") + text("Other") +
            "\x93"
            "2\x87"),
      proto(text("id") + "Q" + text("a") +
            "Q\x86"
            "q\1r\2\0\0\0h\1j\2\0\0\0U\1xT\1\0\0\0yM\1\2((10\x87"s),
      proto(call(name("collections", "OrderedDict"), "](](K\1Nee") + "}" + text("_metadata") + "Nsb"),
      proto(call(name("_codecs", "encode"), text("é") + text("latin1"))),
      proto(call(name("builtins", "getattr"), name("m", "Stage") + text("A"))),
      proto(call(name("copyreg", "_reconstructor"), thing + name("builtins", "object") + "N")),
  };
}

/// Changes a text in one to four places: bits, bytes, lengths; parts taken out, doubled, or from another
/// text.
std::string mutated(std::string content, const std::string& other, std::mt19937& random) {
  const auto below = [&](size_t limit) { return limit == 0 ? 0 : random() % limit; };
  constexpr std::string_view kOpcodes =
      "()]}.012NabcehjoqrstuRQXKMJIGTUCB\x80\x81\x85\x86\x87\x88\x8a\x8c\x8f\x90\x91\x92\x93\x94\x95";
  for (size_t changes = 1 + below(4); changes-- > 0 && !content.empty();) {
    const size_t at = below(content.size()), length = 1 + below(std::min<size_t>(40, content.size() - at));
    switch (below(8)) {
      case 0: content[at] = static_cast<char>(content[at] ^ (1 << below(8))); break;
      case 1: content[at] = static_cast<char>(random()); break;
      case 2: content[at] = kOpcodes[below(kOpcodes.size())]; break;
      case 3: content.erase(at, length); break;
      case 4: content.insert(at, content.substr(at, length)); break;
      case 5: content.insert(below(content.size() + 1), other.substr(below(other.size()), length)); break;
      case 6: content.insert(at, 1, kOpcodes[below(kOpcodes.size())]); break;
      default: {
        const uint64_t values[] = {
            0, 1, 0x7f, 0xff, 0xffff, 0x7fffffff, 0xffffffff, UINT64_MAX, uint64_t{1} << 63};
        const std::string field = number(values[below(std::size(values))], size_t{1} << below(4));
        content.replace(at, std::min(field.size(), content.size() - at), field);
      }
    }
  }
  return content;
}

/// Reads a pickle, and all that is in it; whether it could be read.
bool read_all(const std::string& bytes) {
  try {
    const Pickle pickle = read_pickle(bytes);
    for_each_value(pickle.root(), [&](const PickleValue& value) {
      EXPECT_LE(value.depth, PickleLimits{}.max_depth);
      EXPECT_FALSE(value.describe().empty());
      value.find("a");
      EXPECT_TRUE(value.kind != PickleValue::Kind::kObject ||
                  (value.callable != nullptr && value.arguments != nullptr && !value.global().empty()));
      if (value.kind == PickleValue::Kind::kDict || value.pairs) {
        EXPECT_EQ(value.items.size() % 2, 0u);
      }
    });
    return true;
  } catch (const Error& error) {
    EXPECT_TRUE(std::string_view(error.what()).starts_with("a.pkl: ")) << error.what();
    return false;
  }
}

bool read_file(const std::filesystem::path& path) {
  try {
    const TorchFile file(path);
    for_each_value(file.root(), [&](const PickleValue& value) {
      try {
        if (const auto tensor = file.tensor(value)) {
          EXPECT_TRUE(lies_within(*tensor, file));
        }
      } catch (const Error& error) {
        EXPECT_TRUE(std::string_view(error.what()).starts_with(path.string())) << error.what();
      }
    });
    return true;
  } catch (const Error& error) {
    EXPECT_NE(std::string_view(error.what()).find(path.string()), std::string_view::npos) << error.what();
    return false;
  }
}

TEST(Mutants, OfPickles) {
  std::mt19937 random(11);
  const std::vector<std::string> all = seeds();
  for (const std::string& seed : all) EXPECT_EQ(pickle_error(seed), "");
  int num_read = 0;
  for (int i = 0; i < kMutants; ++i)
    num_read += read_all(mutated(all[random() % all.size()], all[random() % all.size()], random)) ? 1 : 0;
  EXPECT_GT(num_read, kMutants / 50) << "mutants that are too damaged show nothing";
}

TEST(Mutants, OfArchives) {
  std::mt19937 random(12);
  const TestFolder folder;
  const std::vector<std::string> all = seeds();
  const std::string data(16, 'x');
  int num_read = 0;
  for (int i = 0; i < kMutants; ++i) {
    std::string pickle = all[random() % all.size()];
    const bool of_pickle = i % 2 == 0;
    if (of_pickle) pickle = mutated(pickle, all[random() % all.size()], random);
    std::string content = torch_archive(pickle, {{"0", data}}, i % 3 == 0);
    if (!of_pickle) content = mutated(content, all[random() % all.size()], random);
    write_text(folder / "a.pt", content);
    num_read += read_file(folder / "a.pt") ? 1 : 0;
  }
  EXPECT_GT(num_read, kMutants / 50);
}

TEST(Mutants, OfLegacyFiles) {
  std::mt19937 random(13);
  const TestFolder folder;
  const std::vector<std::string> all = seeds();
  int num_read = 0;
  for (int i = 0; i < kMutants; ++i) {
    std::string pickle = all[random() % 6];  // those that have the storage
    const bool of_pickle = i % 2 == 0;
    if (of_pickle) pickle = mutated(pickle, all[random() % all.size()], random);
    const bool is_untyped = pickle.find("UntypedStorage") != std::string::npos;
    std::string content = legacy_file(pickle, is_untyped ? 16 : 4, std::string(16, 'x'));
    if (!of_pickle) content = mutated(content, all[random() % all.size()], random);
    write_text(folder / "a.pt", content);
    num_read += read_file(folder / "a.pt") ? 1 : 0;
  }
  EXPECT_GT(num_read, kMutants / 100);
}

// Whatever follows from the beginnings of a file: it was cut off by a full disk.
TEST(Mutants, CutOffAnywhere) {
  const TestFolder folder;
  for (const std::string& content : {torch_archive(proto(small_tensor()), {{"0", std::string(16, 'x')}}),
                                     legacy_file(proto(small_tensor()), 4, std::string(16, 'x'))})
    for (size_t size = 0; size < content.size(); ++size) {
      write_text(folder / "a.pt", content.substr(0, size));
      EXPECT_FALSE(read_file(folder / "a.pt")) << size;
    }
}

}  // namespace
}  // namespace tessera::checkpoint

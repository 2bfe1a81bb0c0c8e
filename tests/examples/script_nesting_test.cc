// Pickles and code that are nested too deep for libtorch's recursion.
#include "examples/torchscript/script_nesting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/error.h"
#include "core/str.h"
#include "tests/support/errors.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;

constexpr int kMillion = 1'000'000;

std::string repeated(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

/// The error for a pickle of these instructions; empty on success.
std::string pickle_error(const std::string& instructions) {
  return error_of<DataError>([&] { check_pickle("\x80\x02" + instructions + ".", "m.pt: data.pkl"); });
}
std::string code_error(const std::string& code) {
  return error_of<DataError>([&] { check_code(code, "m.pt: code/a.py"); });
}

/// One value in another, `count` times, in each of the ways that a pickle has.
std::string tuples(int count) { return ")" + repeated("\x85", count); }
std::string marked_tuples(int count) { return repeated("(", count) + repeated("t", count); }
std::string lists(int count) { return repeated("]", count) + "N" + repeated("a", count); }
std::string marked_lists(int count) { return repeated("](", count) + "N" + repeated("e", count); }
std::string dicts(int count) { return repeated("}N", count) + "N" + repeated("s", count); }
std::string marked_dicts(int count) { return repeated("}(N", count) + "N" + repeated("u", count); }
std::string objects(int count) { return repeated("c__torch__\nA\n)\x81", count) + repeated("b", count - 1); }
std::string calls(int count) { return repeated("ctorch\nf\n", count) + ")" + repeated("\x85R", count); }

TEST(ScriptNestingTest, DeepPicklesAreRefused) {
  for (const auto& make :
       {&tuples, &marked_tuples, &lists, &marked_lists, &dicts, &marked_dicts, &objects, &calls}) {
    EXPECT_EQ(pickle_error(make(400)), "");
    EXPECT_THAT(pickle_error(make(kMillion)),
                HasSubstr("m.pt: data.pkl: its values are nested deeper than 1000 levels"));
  }
}

// Each list is empty when it is remembered, and put into the one before it later.
TEST(ScriptNestingTest, ValuesThatAreNestedThroughTheMemoCount) {
  const auto chain = [](int count) {
    std::string pickle;
    const auto number = [](int i) {
      return std::string{static_cast<char>(i & 255), static_cast<char>(i >> 8 & 255), 0, 0};
    };
    for (int i = 0; i < count; ++i) pickle += "]r" + number(i) + "0";
    for (int i = 0; i + 1 < count; ++i) pickle += "j" + number(i) + "j" + number(i + 1) + "a0";
    return pickle + "N";
  };
  EXPECT_EQ(pickle_error(chain(900)), "");
  EXPECT_THAT(pickle_error(chain(5000)), HasSubstr("nested deeper than 1000 levels"));
}

TEST(ScriptNestingTest, AValueThatContainsItselfIsRefused) {
  EXPECT_THAT(pickle_error(std::string("]q\0h\0a", 6)), HasSubstr("contains itself"));
  EXPECT_EQ(pickle_error(std::string("]q\0)\x85h\0\x86", 8)), "") << "one value in two places is none";
}

TEST(ScriptNestingTest, DeepTypesAreRefused) {
  const auto tagged = [](int count) {
    const std::string type = repeated("List[", count) + "int" + repeated("]", count);
    std::string length(4, '\0');
    for (int i = 0; i < 4; ++i)
      length[static_cast<size_t>(i)] = static_cast<char>(type.size() >> (8 * i) & 255);
    return str("ctorch.jit._pickle\nrestore_type_tag\n(]X", length, type, "tR");
  };
  EXPECT_EQ(pickle_error(tagged(400)), "");
  EXPECT_THAT(pickle_error(tagged(kMillion)), HasSubstr("its types are nested deeper than 1000 levels"));
  const std::string brackets(5000, '[');
  EXPECT_EQ(pickle_error(str("X", std::string("\x88\x13\0\0", 4), brackets)), "") << "text is no type";
}

TEST(ScriptNestingTest, DamagedPicklesAreRefused) {
  for (const std::string damaged :
       {"t", "a", "R", "h\5", "X\1\1\1\1", "\xff", "c", "N]a", "r\xff\xff\xff\xff", "(0"})
    EXPECT_THAT(pickle_error(damaged), HasSubstr("the file is damaged")) << damaged;
}

TEST(ScriptNestingTest, DeepExpressionsAreRefused) {
  struct Case {
    std::string begin, part, end;
  };
  for (const auto& [begin, part, end] :
       {Case{"", "(", ""}, Case{"", "f(", ""}, Case{"x = ", "[", ""}, Case{"x", "[0]", ""},
        Case{"x = ", "-", "1"}, Case{"x = ", "not ", "True"}, Case{"x = 1", " + 1", ""},
        Case{"x = 1", " ** 1", ""}, Case{"x = 1", " if a else 1", ""}, Case{"a", ".b", ""},
        Case{"f", "()", ""}}) {
    EXPECT_EQ(code_error("def f(self):\n  " + begin + repeated(part, 400) + end + "\n  return 1\n"), "")
        << part;
    EXPECT_THAT(code_error("def f(self):\n  " + begin + repeated(part, kMillion) + end + "\n"),
                HasSubstr("m.pt: code/a.py: its expressions are nested"))
        << part;
  }
}

TEST(ScriptNestingTest, DeepBlocksAreRefused) {
  const auto blocks = [](int count) {
    std::string code, indent;
    for (int i = 0; i < count; ++i) code += indent + "if x:\n", indent += "  ";
    return code + indent + "pass\n";
  };
  const auto elifs = [](int count) { return "if x:\n  pass\n" + repeated("elif x:\n  pass\n", count); };
  for (const auto& make : {std::function<std::string(int)>(blocks), std::function<std::string(int)>(elifs)}) {
    EXPECT_EQ(code_error(make(100)), "");
    EXPECT_THAT(code_error(make(2000)), HasSubstr("its blocks are nested deeper than 250 levels"));
  }
}

TEST(ScriptNestingTest, LongCodeThatIsNotDeepIsNot) {
  EXPECT_EQ(code_error("x = [" + repeated("-1.5, ", 100'000) + "2]\n"), "");
  EXPECT_EQ(code_error(repeated("x = (x + 1.0e-5) * f(a.b, -c)\n", 100'000)), "");
  EXPECT_EQ(code_error("x = \"" + std::string(5000, '(') + "\\\"((\"  # " + std::string(5000, '[') + "\n"),
            "")
      << "text and comments";
  EXPECT_EQ(code_error(repeated("if x:\n  pass\nelse:\n  pass\n", 5000)), "");
}

}  // namespace
}  // namespace tessera::examples

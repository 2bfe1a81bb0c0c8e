// Pickles as data: each opcode, the limits, what is called and what is refused. That Python's own pickles are
// read value by value is in torch_file_library_test.py, attacks are in hostile_pickles_test.py.
#include "checkpoint/formats/pickle.h"

#include <gtest/gtest.h>

#include "checkpoint/formats/pickle_names.h"
#include "core/str.h"
#include "tests/checkpoint/formats/torch_file_testing.h"

namespace tessera::checkpoint {
namespace {

using Kind = PickleValue::Kind;

TEST(Pickle, OpcodesMakeValues) {
  struct Case {
    std::string body;
    std::string description;
  };
  const std::vector<Case> cases = {
      {"N", "None"},
      {"\x88", "True"},
      {"\x89", "False"},
      {"I01\n", "True"},
      {"I00\n", "False"},
      {"I-12\n", "-12"},
      {"I007\n", "7"},
      {"I140187732541696\n", "140187732541696"},
      {"K\xff", "255"},
      {"M\xff\xff", "65535"},
      {"J\xff\xff\xff\xff", "-1"},
      {"J\0\0\0\x80"s, "-2147483648"},
      {"\x8a\0"s, "0"},
      {"\x8a\1\x80"s, "-128"},
      {"\x8a\2\x80\0"s, "128"},
      {"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", "9223372036854775807"},
      {"\x8a\x08\0\0\0\0\0\0\0\x80"s, "-9223372036854775808"},
      {"\x8a\x09\0\0\0\0\0\0\0\x80\0"s, "9223372036854775808"},
      {"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\xff", "-9223372036854775809"},
      {"\x8a\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "-1"},
      {"\x8b\1\0\0\0\x07"s, "7"},
      {"G\xbf\xf8\0\0\0\0\0\0"s, "-1.5"},
      {"X\3\0\0\0abc"s, "the text 'abc'"},
      {"\x8c\3abc", "the text 'abc'"},
      {"\x8d\3\0\0\0\0\0\0\0abc"s, "the text 'abc'"},
      {"X\3\0\0\0\xed\xb2\x80"s, "the text '\\udc80'"},
      {"U\3abc", "the text 'abc'"},
      {"U\1\xff", "1 bytes"},
      {"T\3\0\0\0abc"s, "the text 'abc'"},
      {"C\2\0\1"s, "2 bytes"},
      {"B\2\0\0\0ab"s, "2 bytes"},
      {"\x8e\2\0\0\0\0\0\0\0ab"s, "2 bytes"},
      {"\x96\2\0\0\0\0\0\0\0ab"s, "2 bytes"},
      {")", "a tuple of 0"},
      {"N\x85", "a tuple of 1"},
      {"NN\x86", "a tuple of 2"},
      {"NNN\x87", "a tuple of 3"},
      {"(NNNNt", "a tuple of 4"},
      {"]", "a list of 0"},
      {"]Na", "a list of 1"},
      {"](NNe", "a list of 2"},
      {"}", "a dict of 0"},
      {"}NNs", "a dict of 1"},
      {"}(NNu", "a dict of 1"},
      {"\x8f(NN\x90", "a set of 2"},
      {"(N\x91", "a set of 1"},
      {"N0K\1", "1"},
      {"K\1(K\2K\3"
       "1",
       "1"},
      {"K\1(0", "1"},
      {"K\1"
       "2\x86",
       "a tuple of 2"},
      {"K\7q\0000h\0"s, "7"},
      {"K\7r\1\0\0\0000j\1\0\0\0"s, "7"},
      {"K\7\x94K\x08\x94"
       "00h\1"s,
       "8"},
      {"\x95\1\0\0\0\0\0\0\0N"s, "None"},
      {name("torch", "float32"), "the name torch.float32"},
      {text("torch") + text("float32") + "\x93", "the name torch.float32"},
      {name("__builtin__", "xrange"), "the name builtins.range"},
      {name("copy_reg", "x"), "the name copyreg.x"},
      {name("os", "system"), "the name os.system"},  // a name is data
      {text("a") + "Q", "a persistent id"},
      {call(name("m", "Thing"), ""), "m.Thing"},
      {name("m", "Thing") + ")\x81", "m.Thing"},
      {name("m", "Thing") + ")}\x92", "m.Thing"},
      {"(" + name("m", "Thing") + "o", "m.Thing"},
      {call(name("builtins", "complex"), "NN"), "builtins.complex"},
      {call(name("collections", "OrderedDict"), ""), "a dict of 0"},
      {call(name("collections", "OrderedDict"), "](](K\1Nee"), "a dict of 1"},
      {call(name("collections", "defaultdict"), name("builtins", "list")), "a dict of 0"},
      {call(name("builtins", "set"), "](NK\1e"), "a set of 2"},
      {call(name("__builtin__", "frozenset"), "](NK\1e"), "a set of 2"},
      {call(name("builtins", "tuple"), "](NK\1e"), "a tuple of 2"},
      {call(name("torch", "Size"), "K\1K\2\x86"), "a tuple of 2"},
      {call(name("builtins", "list"), ")"), "a list of 0"},
      {call(name("builtins", "bytearray"), "C\3abc"), "3 bytes"},
      {call(name("builtins", "bytearray"), text("ab") + text("latin-1")), "2 bytes"},
      {call(name("builtins", "bytes"), ""), "0 bytes"},
      {call(name("_codecs", "encode"), text("é") + text("latin1")), "1 bytes"},
      {call(name("builtins", "type"), "N"), "the name types.NoneType"},
      {call(name("builtins", "getattr"), name("m", "Stage") + text("WEIGHTS")), "the name m.Stage.WEIGHTS"},
      {call(name("copy_reg", "_reconstructor"), name("m", "Thing") + name("__builtin__", "object") + "N"),
       "m.Thing"},
      {call(name("copyreg", "__newobj__"), name("m", "Thing") + "N"), "m.Thing"},
      {"(" + text("module") + name("m", "Net") + "NNtQ", "the name m.Net"},
  };
  for (const Case& one : cases) {
    const std::string error = pickle_error(proto(one.body));
    EXPECT_EQ(error, "") << one.description;
    if (error.empty()) {
      EXPECT_EQ(read_pickle(proto(one.body)).root().describe(), one.description);
    }
  }
}

TEST(Pickle, ProtocolsZeroAndOneAreRefusedByName) {
  for (const char* old : {"I1\n.", "(lp0\nI1\na.", "(dp0\nS'a'\np1\nI1\ns.", "]q\1K\1a.", "cos\nsystem\n."})
    EXPECT_NE(pickle_error(old).find("one of protocol 0 or 1 is not read"), std::string::npos) << old;
  for (const char opcode : {'L', 'F', 'S', 'V', 'g', 'p', 'i', 'P', 'l', 'd'})
    EXPECT_EQ(pickle_error(proto(std::string(1, opcode) + "0\n")),
              str("a.pkl: the pickle is damaged at byte 2: opcode ", static_cast<int>(opcode),
                  " is none of protocols 2 to 5"));
  EXPECT_NE(pickle_error("\x80\1K\1.").find("protocol 1; expected 2 to 5"), std::string::npos);
}

TEST(Pickle, IsReadUpToItsStop) {
  const Pickle pickle = read_pickle(proto("K\1") + "anything");
  EXPECT_EQ(pickle.bytes(), 5);
  EXPECT_EQ(pickle.root().integer, 1);
  EXPECT_EQ(pickle.root().depth, 1);
}

TEST(Pickle, RecordsHaveWhatWasGiven) {
  const Pickle pickle =
      read_pickle(proto(name("m", "Thing") + "K\1\x85}" + text("size") + "K\2s\x92}" + text("a") + "K\3sb"));
  const PickleValue& thing = pickle.root();
  ASSERT_EQ(thing.kind, Kind::kObject);
  EXPECT_EQ(thing.global(), "m.Thing");
  ASSERT_EQ(thing.arguments->items.size(), 2u) << "keyword arguments are the last";
  EXPECT_EQ(thing.arguments->items[1]->find("size")->integer, 2);
  ASSERT_NE(thing.find("a"), nullptr);
  EXPECT_EQ(thing.find("a")->integer, 3);
  EXPECT_EQ(thing.find("b"), nullptr);
}

TEST(Pickle, RecordsHaveSlotsAndItems) {
  const Pickle slots = read_pickle(proto(name("m", "Thing") + ")\x81N}" + text("a") +
                                         "K\3s\x86"
                                         "b"));
  ASSERT_NE(slots.root().find("a"), nullptr);
  const Pickle dict = read_pickle(proto(name("m", "Thing") + ")\x81" + text("a") + "K\3s"));
  EXPECT_TRUE(dict.root().pairs);
  ASSERT_NE(dict.root().find("a"), nullptr);
  const Pickle list = read_pickle(proto(name("m", "Thing") + ")\x81(K\1K\2e"));
  EXPECT_FALSE(list.root().pairs);
  EXPECT_EQ(list.root().items.size(), 2u);
  const Pickle ordered =
      read_pickle(proto(call(name("collections", "OrderedDict"), "") + "}" + text("_metadata") + "Nsb"));
  EXPECT_EQ(ordered.root().find("_metadata"), nullptr) << "is an attribute, not a key";
  EXPECT_NE(ordered.root().state->find("_metadata"), nullptr);
}

TEST(Pickle, ValuesMayReferToThemselves) {
  const Pickle pickle = read_pickle(proto("]q\0h\0a"s));
  EXPECT_EQ(pickle.root().items[0], &pickle.root());
  EXPECT_EQ(pickle.root().depth, 1);
}

TEST(Pickle, PersistentIdsAreListed) {
  const Pickle pickle = read_pickle(proto(text("a") + "Q" + text("b") + "Q\x86"));
  ASSERT_EQ(pickle.persistent().size(), 2u);
  EXPECT_EQ(pickle.persistent()[1]->arguments->text, "b");
}

TEST(Pickle, Limits) {
  EXPECT_EQ(pickle_error(proto("](G\0\0\0\0\0\0\0\0G\0\0\0\0\0\0\0\0e"s), {.max_values = 2}),
            "a.pkl: the pickle has more than 2 values");
  EXPECT_NE(pickle_error(proto(text(std::string(1000, 'a'))), {.max_bytes = 900})
                .find("takes more than 900 bytes of memory"),
            std::string::npos);
  EXPECT_EQ(pickle_error(proto("]]]aa"), {.max_depth = 2}),
            "a.pkl: the pickle has values in values more than 2 deep");
  EXPECT_EQ(pickle_error(proto("]]]aa"), {.max_depth = 3}), "");
  // What is deep only from behind: the inner list is complete before the outer ones have it.
  EXPECT_EQ(pickle_error(proto(")q\0"
                               "0h\0\x85q\1"
                               "0h\1\x85q\2"
                               "0](h\0h\1h\2e"s),
                         {.max_depth = 3}),
            "a.pkl: the pickle has values in values more than 3 deep");
}

TEST(Pickle, CallsOfData) {
  for (const char* data : {"collections.OrderedDict", "argparse.Namespace", "datetime.datetime",
                           "torch._utils._rebuild_tensor_v2", "numpy.core.multiarray.scalar",
                           "torch.optim.adamw.AdamW", "mypackage.Thing", "__main__.Thing",
                           "mypackage.types._Thing", "deepspeed.runtime.zero.config.ZeroStageEnum",
                           "torch.distributed.checkpoint.metadata.Metadata", "mypackage.random.Thing.Inner"})
    EXPECT_TRUE(is_data_call(data, PickleCall::kCall)) << data;
  EXPECT_TRUE(is_data_call("deepspeed.utils.tensor_fragment.fragment_address", PickleCall::kClass));
  EXPECT_FALSE(is_data_call("deepspeed.utils.tensor_fragment.fragment_address", PickleCall::kCall));
  EXPECT_FALSE(is_data_call("torch.load", PickleCall::kClass));
  EXPECT_FALSE(is_data_call("copyreg.__newobj__", PickleCall::kClass));
  EXPECT_FALSE(is_data_call("subprocess.Popen", PickleCall::kClass));
}

TEST(Pickle, AMessageHasNoControlCharacters) {
  const std::string error = pickle_error(proto(call(name("os", "sys\x1b[2Jtem"), "")));
  EXPECT_NE(error.find("that is no data"), error.npos);
  EXPECT_EQ(error.find('\x1b'), error.npos);
}

}  // namespace
}  // namespace tessera::checkpoint

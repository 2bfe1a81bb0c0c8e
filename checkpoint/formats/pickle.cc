// [Note: what a pickle may name]
// A pickle may hold any name as a value: nothing is looked up. What it may call is less, because a file that
// calls what makes no data is an attack, or is for a program that we do not know, and a reader that read on
// would say that all is well. A name is "module.name"; both have dots, and Python goes through every part of
// it: "torch.serialization.os.system" is os.system. pickle_names.cc has the lists.
//   - What makes data may be called: OrderedDict, datetime, argparse.Namespace, torch's and numpy's builders.
//   - Anything else of Python's standard library may not: os.system, builtins.eval, functools.partial.
//   - Nor may anything that is reached through a module such as os, subprocess or builtins, whichever package
//     the name begins with, nor through a "__name__".
//   - Of all other packages, a class may be called, which is a record then: its name begins with a capital
//     letter, or NEWOBJ calls it, which only calls classes. A function may not.
//   - Only a name can be called, never the result of another call. Only a record or a dict gets attributes
//     (BUILD), never a module or a class.
// An argument that the callee would call is held to the same: _rebuild_from_type_v2(FUNCTION, …), numpy's
// builders, copyreg.__newobj__(CLASS, …), copyreg._reconstructor(CLASS, …).
#include "checkpoint/formats/pickle.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/numpy_value.h"
#include "checkpoint/formats/pickle_names.h"
#include "checkpoint/formats/pickle_text.h"
#include "core/parse_number.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {

using Kind = PickleValue::Kind;

namespace {

using std::string_view;

constexpr int kMinProtocol = 2, kMaxProtocol = 5;
constexpr size_t kMaxDigits = 4300;     // of an integer; Python's own limit
constexpr size_t kMaxLongBytes = 1750;  // that have at most so many digits
constexpr size_t kMaxNameBytes = 1000;
constexpr int64_t kFreeBytes = int64_t{64} << 20;
constexpr int64_t kBytesPerByte = 256;
constexpr int64_t kItemBytes = 16;  // a vector has up to twice what it needs

uint64_t little_endian(string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

bool is_sequence(const PickleValue& value) {
  return value.kind == Kind::kList || value.kind == Kind::kTuple || value.kind == Kind::kSet;
}

}  // namespace

/// Carries out the opcodes. Its stack is Python's: values, and marks between them; no opcode reaches below
/// the last mark.
class PickleMachine {
 public:
  PickleMachine(Pickle& pickle, std::span<const std::byte> bytes, const std::string& source,
                const PickleLimits& limits)
      : pickle_(pickle),
        bytes_(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
        source_(source),
        limits_(limits) {
    const auto size = static_cast<int64_t>(std::min<size_t>(bytes.size(), size_t{1} << 48));
    max_bytes_ = std::min(limits.max_bytes, kFreeBytes + kBytesPerByte * size);
  }

  void run() {
    for (;;) {
      op_begin_ = position_;
      op_ = take(1)[0];
      if (op_begin_ == 0 && op_ != '\x80') fail_start();
      if (op_ == '.') break;  // STOP
      if (!do_memo() && !do_number() && !do_text() && !do_container() && !do_call()) fail_opcode();
    }
    pickle_.root_ = pop();
    pickle_.bytes_ = static_cast<int64_t>(position_);
    check_tree();
  }

 private:
  using Value = PickleValue;

  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    throw CheckpointError(source_, ": ", args...);
  }
  template <class... Args>
  [[noreturn]] void fail_here(const Args&... args) const {
    fail("the pickle is damaged at byte ", op_begin_, ": ", args...);
  }
  template <class... Args>
  [[noreturn]] void fail_early(const Args&... args) const {
    throw PickleEndsEarly(source_, ": the pickle ends early", args...);
  }
  [[noreturn]] void fail_start() const;
  [[noreturn]] void fail_opcode() const;

  // Input.
  string_view take(uint64_t count);
  uint64_t take_number(size_t bytes) { return little_endian(take(bytes)); }
  string_view take_line(size_t limit);

  // Values.
  void charge(int64_t bytes);
  Value* make(Kind kind);
  Value* make_int(int64_t value);
  Value* make_text(Kind kind, std::string text);
  Value* make_decimal(string_view digits);
  Value* make_long(string_view bytes);
  Value* make_global(string_view module, string_view name);
  Value* make_tuple(std::vector<const Value*> items);
  Value* python2_text(std::string bytes);
  Value* unicode(string_view text);
  void add(Value& to, const Value* item);

  // Stack and memo.
  void push(Value* value) { stack_.push_back(value); }
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Value* top();
  Value* pop();
  std::vector<const Value*> pop_to_mark();
  void put(uint64_t index);
  void get(uint64_t index);

  // Opcodes; false: not one of these.
  bool do_memo();
  bool do_number();
  bool do_text();
  bool do_container();
  bool do_call();
  void append(const std::vector<const Value*>& items);
  void set_items(const std::vector<const Value*>& items);
  void build();
  void persistent(const Value* id);

  // Calls.
  void check_call(const Value& callable, PickleCall call) const;
  void check_called_by(string_view name, const std::vector<const Value*>& arguments) const;
  Value* called(const Value* callable, const Value* arguments, PickleCall call);
  Value* known(string_view name, const std::vector<const Value*>& arguments);
  Value* dict_of(string_view name, std::span<const Value* const> arguments);
  Value* sequence_of(Kind kind, string_view name, std::span<const Value* const> arguments);
  Value* bytes_of(string_view name, std::span<const Value* const> arguments);
  Value* encoded(const std::vector<const Value*>& arguments);
  Value* reconstructed(const std::vector<const Value*>& arguments);
  Value* attribute_of(const std::vector<const Value*>& arguments);
  Value* record(const Value* callable, const Value* arguments);
  [[noreturn]] void fail_arguments(string_view name, const std::string& found) const;

  // After the last opcode.
  void check_tree();
  void check_keys(const Value& dict);

  Pickle& pickle_;
  string_view bytes_;
  const std::string& source_;
  const PickleLimits& limits_;
  int64_t max_bytes_ = 0;
  int64_t used_bytes_ = 0;
  int64_t compared_bytes_ = 0;
  size_t position_ = 0, op_begin_ = 0;
  char op_ = 0;
  std::vector<Value*> stack_;
  std::vector<size_t> marks_;
  std::vector<Value*> memo_;             // by index
  std::map<uint64_t, Value*> far_memo_;  // of indices that are far beyond
  uint64_t memo_size_ = 0;
  Value *none_ = nullptr, *false_ = nullptr, *true_ = nullptr, *empty_tuple_ = nullptr;
  std::vector<Value*> small_ints_ = std::vector<Value*>(256, nullptr);
};

/// Protocols 0 and 1 have no PROTO. torch.save writes 2, torch.distributed.checkpoint 4 or 5.
void PickleMachine::fail_start() const {
  fail("no pickle of protocol ", kMinProtocol, " to ", kMaxProtocol, ": it begins with byte ",
       static_cast<unsigned>(static_cast<uint8_t>(op_)),
       "; one of protocol 0 or 1 is not read: load it in Python, and save it with torch.save");
}

void PickleMachine::fail_opcode() const {
  const auto code = static_cast<unsigned>(static_cast<uint8_t>(op_));
  switch (code) {
    case 0x82:
    case 0x83:
    case 0x84:
      fail("the pickle calls for an extension by its number (EXT", 1U << (code - 0x82), " at byte ",
           op_begin_, "), which only the program that wrote it knows; expected data");
    case 0x97:
    case 0x98:
      fail("the pickle keeps data outside of itself (", code == 0x97 ? "NEXT_BUFFER" : "READONLY_BUFFER",
           " at byte ", op_begin_, "); expected all of it in the file");
    default: break;
  }
  fail_here("opcode ", code, " is none of protocols ", kMinProtocol, " to ", kMaxProtocol);
}

string_view PickleMachine::take(uint64_t count) {
  const size_t left = bytes_.size() - position_;
  if (count > left)
    fail_early(": ", count, " bytes are to follow at byte ", position_, ", and there are ", left);
  const string_view taken = bytes_.substr(position_, count);
  position_ += count;
  return taken;
}

string_view PickleMachine::take_line(size_t limit) {
  const string_view rest = bytes_.substr(position_, limit + 1);
  const size_t end = rest.find('\n');
  if (end == string_view::npos) {
    if (rest.size() > limit) fail_here("a line of more than ", limit, " bytes");
    fail_early(", within the line at byte ", position_);
  }
  position_ += end + 1;
  return rest.substr(0, end);
}

void PickleMachine::charge(int64_t bytes) {
  used_bytes_ += bytes;
  if (used_bytes_ > max_bytes_)
    fail("the pickle of ", format_count(static_cast<int64_t>(bytes_.size())), " bytes takes more than ",
         format_count(max_bytes_), " bytes of memory, at byte ", op_begin_,
         "; expected less: it is an attack, or very large");
}

PickleValue* PickleMachine::make(Kind kind) {
  if (static_cast<int64_t>(pickle_.values_.size()) >= limits_.max_values)
    fail("the pickle has more than ", format_count(limits_.max_values), " values");
  charge(sizeof(Value));
  Value& value = pickle_.values_.emplace_back();
  value.kind = kind;
  return &value;
}

PickleValue* PickleMachine::make_int(int64_t number) {
  const bool is_small = number >= 0 && number < static_cast<int64_t>(small_ints_.size());
  if (is_small && small_ints_[static_cast<size_t>(number)] != nullptr)
    return small_ints_[static_cast<size_t>(number)];
  Value* value = make(Kind::kInt);
  value->integer = number;
  if (is_small) small_ints_[static_cast<size_t>(number)] = value;
  return value;
}

PickleValue* PickleMachine::make_text(Kind kind, std::string text) {
  charge(static_cast<int64_t>(sizeof(std::string) + text.size()));
  Value* value = make(kind);
  value->text = pickle_.texts_.emplace_back(std::move(text));
  return value;
}

PickleValue* PickleMachine::make_decimal(string_view digits) {
  const string_view all = digits;
  const bool is_negative = digits.starts_with('-');
  if (is_negative || digits.starts_with('+')) digits.remove_prefix(1);
  if (digits.empty() || digits.size() > kMaxDigits ||
      digits.find_first_not_of("0123456789") != string_view::npos)
    fail_here("'", shown_text(all), "' is no integer of at most ", kMaxDigits, " digits");
  digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size() - 1));
  std::string text = str(is_negative ? "-" : "", digits);
  if (const auto number = parse_number<int64_t>(text)) return make_int(*number);
  return make_text(Kind::kLong, std::move(text));
}

PickleValue* PickleMachine::make_long(string_view bytes) {
  if (bytes.size() > kMaxLongBytes)
    fail_here("an integer of ", format_count(static_cast<int64_t>(bytes.size())), " bytes; expected ",
              kMaxLongBytes, " at most");
  const auto is_extension = [&] {  // whether the last byte only repeats the sign
    const auto last = static_cast<uint8_t>(bytes.back()),
               before = static_cast<uint8_t>(bytes[bytes.size() - 2]);
    return last == ((before & 0x80) != 0 ? 0xff : 0);
  };
  while (bytes.size() > 1 && is_extension()) bytes.remove_suffix(1);
  if (bytes.size() > 8) return make_text(Kind::kLong, decimal_digits(bytes));
  uint64_t value = little_endian(bytes);
  if (!bytes.empty() && bytes.size() < 8 && (bytes.back() & 0x80) != 0)
    value |= UINT64_MAX << (8 * bytes.size());
  return make_int(static_cast<int64_t>(value));
}

PickleValue* PickleMachine::make_global(string_view module, string_view name) {
  if (module.empty() || name.empty() || module.size() + name.size() > kMaxNameBytes)
    fail_here("a name of ", module.size(), " and ", name.size(), " bytes; expected both, and at most ",
              kMaxNameBytes);
  if (!is_utf8(module) || !is_utf8(name))
    fail_here("a name that is no UTF-8: ", shown_text(str(module, ".", name)));
  return make_text(Kind::kGlobal, modern_name(module, name));
}

PickleValue* PickleMachine::make_tuple(std::vector<const Value*> items) {
  if (items.empty()) return empty_tuple_ != nullptr ? empty_tuple_ : (empty_tuple_ = make(Kind::kTuple));
  Value* tuple = make(Kind::kTuple);
  charge(kItemBytes * static_cast<int64_t>(items.size()));
  tuple->items = std::move(items);
  return tuple;
}

PickleValue* PickleMachine::python2_text(std::string bytes) {
  const bool is_text = is_utf8(bytes);
  return make_text(is_text ? Kind::kString : Kind::kBytes, std::move(bytes));
}

PickleValue* PickleMachine::unicode(string_view text) {
  auto decoded = decoded_utf8(text);
  if (!decoded) fail_here("a text that is no UTF-8");
  return make_text(Kind::kString, *std::move(decoded));
}

void PickleMachine::add(Value& to, const Value* item) {
  charge(kItemBytes);
  to.items.push_back(item);
}

PickleValue* PickleMachine::top() {
  if (stack_.size() <= floor()) fail_here("it needs a value, and there is none on the stack");
  return stack_.back();
}

PickleValue* PickleMachine::pop() {
  Value* value = top();
  stack_.pop_back();
  return value;
}

std::vector<const PickleValue*> PickleMachine::pop_to_mark() {
  if (marks_.empty()) fail_here("it needs a mark, and there is none on the stack");
  const auto begin = stack_.begin() + static_cast<ptrdiff_t>(marks_.back());
  std::vector<const Value*> items(begin, stack_.end());
  stack_.erase(begin, stack_.end());
  marks_.pop_back();
  return items;
}

// Picklers count their indices up, so that the memo is a vector; a file may do otherwise.
void PickleMachine::put(uint64_t index) {
  Value* value = top();
  if (index <= memo_.size()) {
    const bool is_new = (index == memo_.size() || memo_[index] == nullptr) && !far_memo_.contains(index);
    if (index == memo_.size()) {
      charge(kItemBytes);
      memo_.push_back(nullptr);
    }
    memo_[index] = value;
    memo_size_ += is_new ? 1 : 0;
    return;
  }
  const auto [place, is_new] = far_memo_.try_emplace(index, value);
  place->second = value;
  if (!is_new) return;
  charge(64);
  ++memo_size_;
}

void PickleMachine::get(uint64_t index) {
  if (index < memo_.size() && memo_[index] != nullptr) return push(memo_[index]);
  const auto far = far_memo_.find(index);
  if (far == far_memo_.end())
    fail_here("it gets value ", index, " of the memo, which has not been put there");
  push(far->second);
}

bool PickleMachine::do_memo() {
  switch (static_cast<uint8_t>(op_)) {
    case 'q': put(take_number(1)); return true;  // BINPUT
    case 'r': put(take_number(4)); return true;  // LONG_BINPUT
    case 0x94: put(memo_size_); return true;     // MEMOIZE
    case 'h': get(take_number(1)); return true;  // BINGET
    case 'j': get(take_number(4)); return true;  // LONG_BINGET
    case '(':
      marks_.push_back(stack_.size());
      charge(kItemBytes);
      return true;                         // MARK
    case '1': pop_to_mark(); return true;  // POP_MARK
    case '2': push(top()); return true;    // DUP
    case '0':                              // POP
      if (stack_.size() <= floor() && !marks_.empty())
        marks_.pop_back();
      else
        pop();
      return true;
    case 0x80:  // PROTO
      if (const uint64_t protocol = take_number(1); protocol < kMinProtocol || protocol > kMaxProtocol)
        fail_here("protocol ", protocol, "; expected ", kMinProtocol, " to ", kMaxProtocol);
      return true;
    case 0x95: {  // FRAME
      const uint64_t bytes = take_number(8), left = bytes_.size() - position_;
      if (bytes > left)
        fail_early(": a frame of ", bytes, " bytes at byte ", op_begin_, ", and there are ", left);
      return true;
    }
    default: return false;
  }
}

bool PickleMachine::do_number() {
  const auto constant = [&](Value*& value, Kind kind, int64_t number) {
    if (value == nullptr) {
      value = make(kind);
      value->integer = number;
    }
    push(value);
    return true;
  };
  switch (static_cast<uint8_t>(op_)) {
    case 'N': return constant(none_, Kind::kNone, 0);
    case 0x88: return constant(true_, Kind::kBool, 1);                            // NEWTRUE
    case 0x89: return constant(false_, Kind::kBool, 0);                           // NEWFALSE
    case 'K': push(make_int(static_cast<int64_t>(take_number(1)))); return true;  // BININT1
    case 'M': push(make_int(static_cast<int64_t>(take_number(2)))); return true;  // BININT2
    case 'J': push(make_int(static_cast<int32_t>(take_number(4)))); return true;  // BININT
    case 0x8a: push(make_long(take(take_number(1)))); return true;                // LONG1
    case 0x8b: {                                                                  // LONG4
      const auto bytes = static_cast<int32_t>(take_number(4));
      if (bytes < 0) fail_here("an integer of ", bytes, " bytes");
      push(make_long(take(static_cast<uint64_t>(bytes))));
      return true;
    }
    case 'I': {  // INT: Python 2 writes 64 bits so in protocol 2, too
      const string_view line = take_line(kMaxDigits + 2);
      if (line == "00") return constant(false_, Kind::kBool, 0);
      if (line == "01") return constant(true_, Kind::kBool, 1);
      push(make_decimal(line));
      return true;
    }
    case 'G': {  // BINFLOAT, big-endian
      uint64_t bits = 0;
      for (const char c : take(8)) bits = bits << 8 | static_cast<uint8_t>(c);
      Value* value = make(Kind::kFloat);
      value->number = std::bit_cast<double>(bits);
      push(value);
      return true;
    }
    default: return false;
  }
}

bool PickleMachine::do_text() {
  const auto bytes = [&](size_t length_bytes) {
    const string_view taken = take(take_number(length_bytes));
    charge(static_cast<int64_t>(taken.size()));  // before they are copied
    used_bytes_ -= static_cast<int64_t>(taken.size());
    return taken;
  };
  const auto push_bytes = [&](string_view taken) {
    push(make_text(Kind::kBytes, std::string(taken)));
    return true;
  };
  switch (static_cast<uint8_t>(op_)) {
    case 0x8c: push(unicode(bytes(1))); return true;                   // SHORT_BINUNICODE
    case 'X': push(unicode(bytes(4))); return true;                    // BINUNICODE
    case 0x8d: push(unicode(bytes(8))); return true;                   // BINUNICODE8
    case 'C': return push_bytes(bytes(1));                             // SHORT_BINBYTES
    case 'B': return push_bytes(bytes(4));                             // BINBYTES
    case 0x8e:                                                         // BINBYTES8
    case 0x96: return push_bytes(bytes(8));                            // BYTEARRAY8
    case 'U': push(python2_text(std::string(bytes(1)))); return true;  // SHORT_BINSTRING
    case 'T': {                                                        // BINSTRING
      const auto length = static_cast<int32_t>(take_number(4));
      if (length < 0) fail_here("a text of ", length, " bytes");
      push(python2_text(std::string(take(static_cast<uint64_t>(length)))));
      return true;
    }
    default: return false;
  }
}

bool PickleMachine::do_container() {
  const auto tuple_of = [&](size_t count) {
    std::vector<const Value*> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    push(make_tuple(std::move(items)));
    return true;
  };
  switch (static_cast<uint8_t>(op_)) {
    case ')': push(make_tuple({})); return true;             // EMPTY_TUPLE
    case 0x85: return tuple_of(1);                           // TUPLE1
    case 0x86: return tuple_of(2);                           // TUPLE2
    case 0x87: return tuple_of(3);                           // TUPLE3
    case 't': push(make_tuple(pop_to_mark())); return true;  // TUPLE
    case ']': push(make(Kind::kList)); return true;          // EMPTY_LIST
    case '}': push(make(Kind::kDict)); return true;          // EMPTY_DICT
    case 0x8f: push(make(Kind::kSet)); return true;          // EMPTY_SET
    case 0x91: {                                             // FROZENSET
      const std::vector<const Value*> items = pop_to_mark();
      push(make(Kind::kSet));
      append(items);
      top()->text = "builtins.frozenset";
      return true;
    }
    case 'a': append({pop()}); return true;         // APPEND
    case 'e':                                       // APPENDS
    case 0x90: append(pop_to_mark()); return true;  // ADDITEMS
    case 's': {                                     // SETITEM
      const Value* value = pop();
      const Value* key = pop();
      set_items({key, value});
      return true;
    }
    case 'u': set_items(pop_to_mark()); return true;  // SETITEMS
    default: return false;
  }
}

void PickleMachine::append(const std::vector<const Value*>& items) {
  Value& to = *top();
  const bool is_set_opcode = static_cast<uint8_t>(op_) == 0x90 || static_cast<uint8_t>(op_) == 0x91;
  const bool fits =
      to.kind == (is_set_opcode ? Kind::kSet : Kind::kList) || (to.kind == Kind::kObject && !to.pairs);
  if (!fits)
    fail("the pickle appends to ", to.describe(), ", at byte ", op_begin_,
         "; expected a list, a set or an object");
  for (const Value* item : items) add(to, item);
}

void PickleMachine::set_items(const std::vector<const Value*>& items) {
  Value& to = *top();
  if (items.size() % 2 != 0) fail_here("a key without a value");
  if (to.kind != Kind::kDict && !(to.kind == Kind::kObject && (to.pairs || to.items.empty())))
    fail("the pickle sets keys of ", to.describe(), ", at byte ", op_begin_,
         "; expected a dict or an object");
  if (to.kind == Kind::kObject && !items.empty()) to.pairs = true;
  for (const Value* item : items) add(to, item);
}

bool PickleMachine::do_call() {
  const auto call = [&](const Value* callable, const Value* arguments, PickleCall how) {
    push(called(callable, arguments, how));
    return true;
  };
  switch (static_cast<uint8_t>(op_)) {
    case 'c': {  // GLOBAL
      const string_view module = take_line(kMaxNameBytes), name = take_line(kMaxNameBytes);
      push(make_global(module, name));
      return true;
    }
    case 0x93: {  // STACK_GLOBAL
      const Value *name = pop(), *module = pop();
      if (name->kind != Kind::kString || module->kind != Kind::kString)
        fail("the pickle makes a name of ", module->describe(), " and ", name->describe(), ", at byte ",
             op_begin_, "; expected two texts");
      push(make_global(module->text, name->text));
      return true;
    }
    case 'R': {  // REDUCE
      const Value *arguments = pop(), *callable = pop();
      return call(callable, arguments, PickleCall::kCall);
    }
    case 'o': {  // OBJ
      std::vector<const Value*> items = pop_to_mark();
      if (items.empty()) fail_here("an object without a class");
      const Value* callable = items.front();
      items.erase(items.begin());
      return call(callable, make_tuple(std::move(items)), PickleCall::kCall);
    }
    case 0x81: {  // NEWOBJ
      const Value *arguments = pop(), *callable = pop();
      return call(callable, arguments, PickleCall::kClass);
    }
    case 0x92: {  // NEWOBJ_EX
      const Value *keywords = pop(), *arguments = pop(), *callable = pop();
      if (keywords->kind != Kind::kDict)
        fail("the pickle has ", keywords->describe(), " as keyword arguments, at byte ", op_begin_,
             "; expected a dict");
      if (keywords->items.empty() || arguments->kind != Kind::kTuple)
        return call(callable, arguments, PickleCall::kClass);
      std::vector<const Value*> items = arguments->items;
      items.push_back(keywords);
      return call(callable, make_tuple(std::move(items)), PickleCall::kClass);
    }
    case 'b': build(); return true;
    case 'Q': persistent(pop()); return true;  // BINPERSID
    default: return false;
  }
}

void PickleMachine::build() {
  const Value* state = pop();
  Value& to = *top();
  if (to.kind != Kind::kObject && to.kind != Kind::kDict)
    fail("the pickle sets attributes of ", to.describe(), ", at byte ", op_begin_,
         ": that is no data; expected an object that it has made");
  if (to.state != nullptr)
    fail("the pickle sets the attributes of ", to.describe(), " twice, at byte ", op_begin_);
  to.state = state;
}

// Legacy files of torch.save give classes of modules as ("module", CLASS, FILE, SOURCE), to compare the
// source.
void PickleMachine::persistent(const Value* id) {
  if (id->kind == Kind::kTuple && id->items.size() == 4 && id->items[0]->kind == Kind::kString &&
      id->items[0]->text == "module" && id->items[1]->kind == Kind::kGlobal) {
    Value* global = make(Kind::kGlobal);
    global->text = id->items[1]->text;
    return push(global);
  }
  Value* value = make(Kind::kPersistent);
  value->arguments = id;
  charge(kItemBytes);
  pickle_.persistent_.push_back(value);
  push(value);
}

void PickleMachine::check_call(const Value& callable, PickleCall call) const {
  if (callable.kind != Kind::kGlobal)
    fail("the pickle calls ", callable.describe(), ", at byte ", op_begin_,
         ": that is no data; expected the name of a class. Nothing of the file was executed");
  if (!is_data_call(callable.text, call))
    fail("the pickle calls ", shown_text(callable.text),
         ": that is no data; nothing of the file was executed, and no program "
         "should load it unless whoever wrote it is trusted");
}

PickleValue* PickleMachine::called(const Value* callable, const Value* arguments, PickleCall call) {
  check_call(*callable, call);
  if (arguments->kind != Kind::kTuple)
    fail("the pickle calls ", shown_text(callable->text), " with ", arguments->describe(), ", at byte ",
         op_begin_, "; expected a tuple");
  if (Value* value = known(callable->text, arguments->items)) return value;
  return record(callable, arguments);
}

PickleValue* PickleMachine::record(const Value* callable, const Value* arguments) {
  Value* object = make(Kind::kObject);
  object->callable = callable;
  object->arguments = arguments;
  return object;
}

void PickleMachine::fail_arguments(string_view name, const std::string& found) const {
  fail("the pickle calls ", shown_text(name), " with ", found, ", at byte ", op_begin_,
       ", which makes no data");
}

PickleValue* PickleMachine::known(string_view name, const std::vector<const Value*>& arguments) {
  const std::span all(arguments);
  if (name == "collections.OrderedDict" || name == "builtins.dict" || name == "collections.Counter")
    return dict_of(name, all);
  if (name == "collections.defaultdict") return dict_of(name, all.subspan(std::min<size_t>(1, all.size())));
  if (name == "builtins.list") return sequence_of(Kind::kList, name, all);
  if (name == "builtins.tuple" || name == "torch.Size") return sequence_of(Kind::kTuple, name, all);
  if (name == "builtins.set" || name == "builtins.frozenset") return sequence_of(Kind::kSet, name, all);
  if (name == "builtins.bytes" || name == "builtins.bytearray") return bytes_of(name, all);
  if (name == "_codecs.encode") return encoded(arguments);
  if (name == "builtins.getattr") return attribute_of(arguments);
  if (name.ends_with(".multiarray.scalar") && arguments.size() == 2)
    if (auto scalar = numpy_scalar(*arguments[0], arguments[1]->text)) {
      Value* value = make_text(scalar->kind, std::move(scalar->text));
      value->integer = scalar->integer, value->number = scalar->number;
      return value;
    }
  if (name == "copyreg._reconstructor") return reconstructed(arguments);
  if (name == "builtins.type") {  // of None, …, NotImplemented
    if (arguments.size() != 1 || arguments[0]->kind != Kind::kNone) fail_arguments(name, "what is not None");
    return make_text(Kind::kGlobal, "types.NoneType");
  }
  if (name == "copyreg.__newobj__" || name == "copyreg.__newobj_ex__") {
    if (arguments.empty()) fail_arguments(name, "no class");
    if (name == "copyreg.__newobj_ex__") {
      if (arguments.size() != 3) fail_arguments(name, str(arguments.size(), " arguments"));
      if (arguments[2]->kind == Kind::kDict && arguments[2]->items.empty())
        return called(arguments[0], arguments[1], PickleCall::kClass);
      return called(arguments[0], make_tuple({arguments[1], arguments[2]}), PickleCall::kClass);
    }
    return called(arguments[0], make_tuple({arguments.begin() + 1, arguments.end()}), PickleCall::kClass);
  }
  check_called_by(name, arguments);
  return nullptr;
}

// Torch's builder of subclasses calls its first argument with the third; numpy's of random generators and of
// arrays call classes that they are given.
void PickleMachine::check_called_by(string_view name, const std::vector<const Value*>& arguments) const {
  constexpr int kMaxNested = 8;
  const auto is_from_type = [](string_view builder) {
    return builder.starts_with("torch.") && builder.find("._rebuild_from_type") != string_view::npos;
  };
  const std::vector<const Value*>* given = &arguments;
  for (int nested = 0; is_from_type(name); ++nested) {
    if (given->size() != 4 || (*given)[2]->kind != Kind::kTuple || nested == kMaxNested)
      fail_arguments(name, str(given->size(), " arguments"));
    check_call(*(*given)[0], PickleCall::kCall);
    check_call(*(*given)[0], PickleCall::kClass);  // nor the functions that have a meaning here
    name = (*given)[0]->text;
    given = &(*given)[2]->items;
  }
  if (!name.starts_with("numpy.")) return;
  for (const Value* argument : *given)
    if (argument->kind == Kind::kGlobal) check_call(*argument, PickleCall::kCall);
}

PickleValue* PickleMachine::dict_of(string_view name, std::span<const Value* const> arguments) {
  if (arguments.size() > 1) fail_arguments(name, str(arguments.size(), " arguments"));
  Value* dict = make(Kind::kDict);
  if (name == "collections.OrderedDict" || name == "collections.Counter") dict->text = name;
  if (arguments.empty()) return dict;
  const Value& from = *arguments[0];
  if (from.kind == Kind::kDict) {
    for (const Value* item : from.items) add(*dict, item);
    return dict;
  }
  if (from.kind != Kind::kList && from.kind != Kind::kTuple) fail_arguments(name, from.describe());
  for (const Value* pair : from.items) {
    if ((pair->kind != Kind::kList && pair->kind != Kind::kTuple) || pair->items.size() != 2)
      fail_arguments(name, str(from.describe(), " that has ", pair->describe()));
    add(*dict, pair->items[0]);
    add(*dict, pair->items[1]);
  }
  return dict;
}

PickleValue* PickleMachine::sequence_of(Kind kind, string_view name,
                                        std::span<const Value* const> arguments) {
  if (arguments.size() > 1) fail_arguments(name, str(arguments.size(), " arguments"));
  if (!arguments.empty() && !is_sequence(*arguments[0])) fail_arguments(name, arguments[0]->describe());
  Value* value = make(kind);
  if (name == "builtins.frozenset") value->text = name;
  if (!arguments.empty())
    for (const Value* item : arguments[0]->items) add(*value, item);
  return value;
}

PickleValue* PickleMachine::bytes_of(string_view name, std::span<const Value* const> arguments) {
  if (arguments.empty()) return make_text(Kind::kBytes, "");
  if (arguments.size() == 1 && arguments[0]->kind == Kind::kBytes)
    return make_text(Kind::kBytes, std::string(arguments[0]->text));
  if (arguments.size() == 2) return encoded({arguments[0], arguments[1]});
  fail_arguments(name, arguments[0]->describe());
}

PickleValue* PickleMachine::encoded(const std::vector<const Value*>& arguments) {
  if (arguments.size() != 2 || arguments[0]->kind != Kind::kString || arguments[1]->kind != Kind::kString ||
      (arguments[1]->text != "latin1" && arguments[1]->text != "latin-1"))
    fail_arguments("_codecs.encode", arguments.size() < 2
                                         ? "too few arguments"
                                         : str(arguments[0]->describe(), " and ", arguments[1]->describe()));
  charge(static_cast<int64_t>(arguments[0]->text.size()));
  auto bytes = encoded_latin1(arguments[0]->text);
  if (!bytes) fail_arguments("_codecs.encode", "a text beyond Latin-1");
  return make_text(Kind::kBytes, *std::move(bytes));
}

// Protocols 0 and 1: copyreg._reconstructor(CLASS, BASE, VALUE) is CLASS.__new__, and BASE.__init__ with the
// value.
PickleValue* PickleMachine::reconstructed(const std::vector<const Value*>& arguments) {
  constexpr string_view kName = "copyreg._reconstructor";
  if (arguments.size() != 3) fail_arguments(kName, str(arguments.size(), " arguments"));
  check_call(*arguments[0], PickleCall::kClass);
  check_call(*arguments[1], PickleCall::kClass);
  const Value& from = *arguments[2];
  const bool has_items = from.kind == Kind::kList || from.kind == Kind::kDict;
  const Value* given = &from;
  if (from.kind == Kind::kNone || has_items)
    given = make_tuple({});
  else if (from.kind != Kind::kTuple)
    given = make_tuple({&from});  // of a named tuple, they are its fields
  Value* object = record(arguments[0], given);
  if (has_items)
    for (const Value* item : from.items) add(*object, item);
  object->pairs = from.kind == Kind::kDict && !from.items.empty();
  return object;
}

// Python 3.11 writes a member of an enum as getattr(CLASS, NAME).
PickleValue* PickleMachine::attribute_of(const std::vector<const Value*>& arguments) {
  constexpr string_view kName = "builtins.getattr";
  if (arguments.size() != 2) fail_arguments(kName, str(arguments.size(), " arguments"));
  const Value &from = *arguments[0], &name = *arguments[1];
  if (from.kind != Kind::kGlobal || name.kind != Kind::kString || !is_enum_class(from.text) ||
      !is_plain_attribute(name.text))
    fail("the pickle calls builtins.getattr with ", from.describe(), " and ", name.describe(),
         ": that is no data; expected the member of an enum. Nothing of the file was executed");
  return make_text(Kind::kGlobal, str(from.text, ".", name.text));
}

// Goes through all values that the root has, without recursion: each is on the path from the root while its
// depth is being found, and is known after. A value that is on the path contains itself, and counts no more.
void PickleMachine::check_tree() {
  constexpr uint16_t kOnPath = UINT16_MAX;
  struct Step {
    Value* value;
    size_t next = 0;     // of its values
    uint16_t depth = 0;  // of those before
  };
  const auto child = [](const Value& value, size_t index) -> const Value* {
    return index == 0   ? value.callable
           : index == 1 ? value.arguments
           : index == 2 ? value.state
                        : value.items[index - 3];
  };
  const auto limit = static_cast<size_t>(std::clamp(limits_.max_depth, 1, 60'000));
  std::vector<Step> path;
  const auto enter = [&](const Value* value) {
    if (path.size() >= limit) fail("the pickle has values in values more than ", limit, " deep");
    auto* mine = const_cast<Value*>(value);  // all values are this pickle's own
    mine->depth = kOnPath;
    path.push_back({mine});
  };
  enter(pickle_.root_);
  while (!path.empty()) {
    Step& step = path.back();
    if (step.next < step.value->items.size() + 3) {
      const Value* inner = child(*step.value, step.next++);
      if (inner == nullptr || inner->depth == kOnPath) continue;
      if (inner->depth == 0)
        enter(inner);
      else
        step.depth = std::max(step.depth, inner->depth);
      continue;
    }
    const auto depth = static_cast<uint16_t>(step.depth + 1);
    if (depth > limit) fail("the pickle has values in values more than ", limit, " deep");
    if (step.value->kind == Kind::kDict || step.value->pairs) check_keys(*step.value);
    step.value->depth = depth;
    path.pop_back();
    if (!path.empty()) path.back().depth = std::max(path.back().depth, depth);
  }
}

// A key that is set twice is one for Python, which takes the later value; no pickler writes that. Texts can
// be long, and the same ones be keys of many dicts: so it is counted what is compared.
void PickleMachine::check_keys(const Value& dict) {
  std::vector<const Value*> keys;
  for (size_t i = 0; i < dict.items.size(); i += 2)
    if (const Kind kind = dict.items[i]->kind;
        kind == Kind::kString || kind == Kind::kBytes || kind == Kind::kInt)
      keys.push_back(dict.items[i]);
  const auto compare = [&](const Value* a, const Value* b) {
    if (a->kind != b->kind) return a->kind < b->kind ? -1 : 1;
    if (a->kind == Kind::kInt) return a->integer == b->integer ? 0 : a->integer < b->integer ? -1 : 1;
    if (a->text.size() != b->text.size()) return a->text.size() < b->text.size() ? -1 : 1;
    if (a->text.data() == b->text.data()) return 0;
    compared_bytes_ += static_cast<int64_t>(a->text.size());
    return std::memcmp(a->text.data(), b->text.data(), a->text.size());
  };
  std::sort(keys.begin(), keys.end(), [&](const Value* a, const Value* b) { return compare(a, b) < 0; });
  for (size_t i = 1; i < keys.size(); ++i)
    if (compare(keys[i - 1], keys[i]) == 0)
      fail("the pickle has a dict with the key ", keys[i]->describe(), " twice");
  if (compared_bytes_ > limits_.max_bytes) fail("the pickle has too many long keys: it is an attack");
}

Pickle::Pickle(std::span<const std::byte> bytes, const std::string& source, const PickleLimits& limits) {
  PickleMachine(*this, bytes, source, limits).run();
}

}  // namespace tessera::checkpoint

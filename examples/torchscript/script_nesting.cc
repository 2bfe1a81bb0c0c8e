#include "examples/torchscript/script_nesting.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/str.h"

namespace tessera::examples {
namespace {

[[noreturn]] void fail_deep(const std::string& name, const char* what) {
  throw DataError(name, ": its ", what, " are nested deeper than ", kMaxScriptNesting,
                  " levels; expected what torch.jit.save writes");
}

/// The largest number of brackets that are open at once, as in "List[List[int]]".
int bracket_depth(std::string_view text) {
  int depth = 0, most = 0;
  for (const char c : text) {
    if (c == '[' || c == '(') most = std::max(most, ++depth);
    if (c == ']' || c == ')') --depth;
  }
  return most;
}

/// Follows the instructions of a pickle (Python's pickletools.py describes them) with numbers in place of
/// values. Used by one thread, once.
class PickleScan {
 public:
  PickleScan(std::string_view pickle, const std::string& name) : pickle_(pickle), name_(name) {}

  void run() {
    while (step()) {
    }
    check_depth();
  }

 private:
  static constexpr int32_t kScalar = -1;  // contains nothing

  struct Node {
    bool is_type_tag = false;      // the function that parses a type's name
    bool has_deep_string = false;  // a string with many brackets, or a tuple with one
  };

  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(name_, ": byte ", at_, ": ", what,
                    "; expected a pickle as torch.jit.save writes it (the file is damaged)");
  }

  std::string_view take(uint64_t count) {
    if (count > pickle_.size() - next_) fail("it ends within a value");
    const std::string_view bytes = pickle_.substr(next_, count);
    next_ += count;
    return bytes;
  }
  uint64_t number(size_t bytes) {
    uint64_t value = 0;
    const std::string_view text = take(bytes);
    for (size_t i = 0; i < bytes; ++i)
      value |= static_cast<uint64_t>(static_cast<uint8_t>(text[i])) << (8 * i);
    return value;
  }
  std::string_view line() {
    const size_t end = pickle_.find('\n', next_);
    if (end == pickle_.npos) fail("it ends within a line");
    const std::string_view text = take(end - next_);
    take(1);
    return text;
  }

  int32_t add(Node node) {
    nodes_.push_back(node);
    return static_cast<int32_t>(nodes_.size() - 1);
  }
  void push(int32_t value) { stack_.push_back(value); }
  /// Values that the last mark does not protect.
  size_t available() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  int32_t pop() {
    if (available() == 0) fail("there is no value on its stack");
    const int32_t value = stack_.back();
    stack_.pop_back();
    return value;
  }
  int32_t top() const {
    if (available() == 0) fail("there is no value on its stack");
    return stack_.back();
  }
  void put_into(int32_t container, int32_t value) {
    if (container == kScalar) fail("a value is added to one that is no container");
    if (value != kScalar) edges_.emplace_back(container, value);
  }
  std::vector<int32_t> pop_to_mark() {
    if (marks_.empty()) fail("there is no mark on its stack");
    std::vector<int32_t> values(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return values;
  }
  void push_container(const std::vector<int32_t>& values) {
    Node node;
    for (const int32_t value : values)
      node.has_deep_string |= value != kScalar && nodes_[static_cast<size_t>(value)].has_deep_string;
    const int32_t made = add(node);
    for (const int32_t value : values) put_into(made, value);
    push(made);
  }
  void push_tuple(int count) {
    std::vector<int32_t> values(static_cast<size_t>(count));
    for (int32_t& value : values) value = pop();
    push_container(values);
  }
  void push_string(std::string_view text) {
    push(bracket_depth(text) > kMaxScriptNesting ? add({.is_type_tag = false, .has_deep_string = true})
                                                 : kScalar);
  }
  void add_to_top(const std::vector<int32_t>& values) {
    for (const int32_t value : values) put_into(top(), value);
  }
  void remember(uint64_t place) {
    if (place > pickle_.size())
      fail("it counts more values than it can have");  // libtorch makes room for so many
    if (memo_.size() <= place) memo_.resize(place + 1, kScalar);
    memo_[place] = top();
  }
  void recall(uint64_t place) {
    if (place >= memo_.size()) fail("it refers to a value that it does not have");
    push(memo_[place]);
  }

  /// Carries out an instruction. False: it was the last.
  bool step() {
    at_ = next_;
    const auto code = static_cast<unsigned char>(take(1)[0]);
    switch (code) {
      case 0x80: take(1); break;  // PROTO
      case 0x95: take(8); break;  // FRAME
      case '.': return false;
      case '(': marks_.push_back(stack_.size()); break;
      case '0': pop(); break;
      case '1': pop_to_mark(); break;
      case '2': push(top()); break;
      case 'N':
      case 0x88:
      case 0x89: push(kScalar); break;  // NONE, NEWTRUE, NEWFALSE
      case 'K':
        take(1);
        push(kScalar);
        break;  // BININT1
      case 'M':
        take(2);
        push(kScalar);
        break;  // BININT2
      case 'J':
        take(4);
        push(kScalar);
        break;  // BININT
      case 'G':
        take(8);
        push(kScalar);
        break;  // BINFLOAT
      case 0x8a:
        take(number(1));
        push(kScalar);
        break;  // LONG1
      case 0x8b:
        take(number(4));
        push(kScalar);
        break;  // LONG4
      case 'C':
        take(number(1));
        push(kScalar);
        break;  // SHORT_BINBYTES
      case 'B':
        take(number(4));
        push(kScalar);
        break;  // BINBYTES
      case 0x8e:
        take(number(8));
        push(kScalar);
        break;  // BINBYTES8
      case 'U':
      case 0x8c: push_string(take(number(1))); break;  // SHORT_BINSTRING, SHORT_BINUNICODE
      case 'T':
      case 'X': push_string(take(number(4))); break;   // BINSTRING, BINUNICODE
      case 0x8d: push_string(take(number(8))); break;  // BINUNICODE8
      case 'c': {                                      // GLOBAL
        line();
        push(add({.is_type_tag = line() == "restore_type_tag", .has_deep_string = false}));
        break;
      }
      case ']':
      case ')':
      case '}':
      case 0x8f: push(add({})); break;  // EMPTY_LIST, _TUPLE, _DICT, _SET
      case 't':
      case 'l':
      case 'd':
      case 0x91: push_container(pop_to_mark()); break;  // TUPLE, LIST, DICT, FROZENSET
      case 0x85: push_tuple(1); break;
      case 0x86: push_tuple(2); break;
      case 0x87: push_tuple(3); break;
      case 'a': add_to_top({pop()}); break;  // APPEND
      case 'e':
      case 'u':
      case 0x90: add_to_top(pop_to_mark()); break;  // APPENDS, SETITEMS, ADDITEMS
      case 's': {                                   // SETITEM
        const int32_t value = pop(), key = pop();
        add_to_top({key, value});
        break;
      }
      case 'b': add_to_top({pop()}); break;  // BUILD
      case 'Q': push_tuple(1); break;        // BINPERSID
      case 'R':
      case 0x81: call(); break;  // REDUCE, NEWOBJ
      case 'q': remember(number(1)); break;
      case 'r': remember(number(4)); break;
      case 'h': recall(number(1)); break;
      case 'j': recall(number(4)); break;
      default: fail(str("found the instruction ", static_cast<int>(code)));
    }
    return true;
  }

  void call() {
    const int32_t arguments = pop(), function = pop();
    const auto node = [&](int32_t value) {
      return value == kScalar ? Node{} : nodes_[static_cast<size_t>(value)];
    };
    if (node(function).is_type_tag && node(arguments).has_deep_string) fail_deep(name_, "types");
    const int32_t made = add({});
    for (const int32_t value : {function, arguments}) put_into(made, value);
    push(made);
  }

  /// The longest path from a value to one in it, by removing those that are in no other, again and again.
  void check_depth() const {
    std::vector<int32_t> first(nodes_.size() + 1), inside(edges_.size()), num_holders(nodes_.size()),
        depth(nodes_.size(), 1);
    for (const auto& [container, value] : edges_)
      ++first[static_cast<size_t>(container) + 1], ++num_holders[static_cast<size_t>(value)];
    for (size_t i = 1; i < first.size(); ++i) first[i] += first[i - 1];
    std::vector<int32_t> next(first.begin(), first.end() - 1);
    for (const auto& [container, value] : edges_)
      inside[static_cast<size_t>(next[static_cast<size_t>(container)]++)] = value;
    std::vector<size_t> ready;
    for (size_t node = 0; node < nodes_.size(); ++node)
      if (num_holders[node] == 0) ready.push_back(node);
    size_t num_done = 0;
    for (; !ready.empty(); ++num_done) {
      const size_t node = ready.back();
      ready.pop_back();
      if (depth[node] > kMaxScriptNesting) fail_deep(name_, "values");
      for (int32_t i = first[node]; i < first[node + 1]; ++i) {
        const auto value = static_cast<size_t>(inside[static_cast<size_t>(i)]);
        depth[value] = std::max(depth[value], depth[node] + 1);
        if (--num_holders[value] == 0) ready.push_back(value);
      }
    }
    if (num_done < nodes_.size())
      throw DataError(name_, ": has a value that contains itself; expected what torch.jit.save writes");
  }

  std::string_view pickle_;
  const std::string& name_;
  size_t at_ = 0, next_ = 0;
  std::vector<Node> nodes_;
  std::vector<std::pair<int32_t, int32_t>> edges_;  // container and what is in it
  std::vector<int32_t> stack_, memo_;
  std::vector<size_t> marks_;
};

/// Counts what the parser of TorchScript enters without leaving. Used by one thread, once.
class CodeScan {
 public:
  CodeScan(std::string_view code, const std::string& name) : code_(code), name_(name) {}

  void run() {
    begin_line();
    while (at_ < code_.size()) {
      const char c = code_[at_];
      if (c == '#') {
        at_ = std::min(code_.find('\n', at_), code_.size());
      } else if (c == '\'' || c == '"') {
        skip_string(c);
      } else if (std::isalpha(static_cast<unsigned char>(c)) || c == '_') {
        word();
      } else if (c == '\n') {
        ++at_;
        if (levels_.size() == 1) begin_line();
      } else {
        symbol(c);
        ++at_;
      }
    }
  }

 private:
  /// Adds to the innermost bracket, until its next comma.
  void enter() {
    ++levels_.back();
    if (++depth_ > kMaxScriptNesting) fail_deep(name_, "expressions");
  }
  void leave_part() { depth_ -= std::exchange(levels_.back(), 0); }

  void symbol(char c) {
    constexpr std::string_view kOperators = "+-*/%@&|^~<>=!.";
    if (c == '(' || c == '[' || c == '{') {
      enter();
      levels_.push_back(0);
    } else if (c == ')' || c == ']' || c == '}') {
      leave_part();
      if (levels_.size() > 1) levels_.pop_back();
    } else if (c == ',' || c == ';') {
      leave_part();
    } else if (kOperators.find(c) != kOperators.npos &&
               !(c == '.' && at_ > 0 && std::isdigit(static_cast<unsigned char>(code_[at_ - 1])))) {
      enter();
    }
  }

  void word() {
    const size_t begin = at_;
    while (at_ < code_.size() && (std::isalnum(static_cast<unsigned char>(code_[at_])) || code_[at_] == '_'))
      ++at_;
    const std::string_view text = code_.substr(begin, at_ - begin);
    for (const std::string_view one : {"not", "and", "or", "if", "else", "in", "is", "lambda"})
      if (text == one) enter();
  }

  void skip_string(char quote) {
    const std::string_view three = code_.substr(at_, 3);
    const bool is_long = three == std::string(3, quote);
    at_ += is_long ? 3 : 1;
    while (at_ < code_.size()) {
      if (code_[at_] == '\\') {
        at_ += 2;
      } else if (is_long ? code_.substr(at_, 3) == three : code_[at_] == quote || code_[at_] == '\n') {
        at_ += is_long ? 3 : 1;
        return;
      } else {
        ++at_;
      }
    }
    at_ = code_.size();
  }

  /// A line outside of brackets: how many blocks it is in. An elif is in the block of what it follows.
  void begin_line() {
    leave_part();
    const size_t text = code_.find_first_not_of(" \t", at_);
    if (text == code_.npos || code_[text] == '\n' || code_[text] == '#') return;
    const size_t indent = text - at_;
    while (!blocks_.empty() && blocks_.back().indent > indent) blocks_.pop_back();
    if (blocks_.empty() || blocks_.back().indent < indent) blocks_.push_back({indent, 0});
    const std::string_view line = code_.substr(text, 5);
    if (line.starts_with("elif"))
      ++blocks_.back().num_elifs;
    else if (!line.starts_with("else"))
      blocks_.back().num_elifs = 0;
    const size_t depth = blocks_.size() + blocks_.back().num_elifs;
    if (depth > kMaxBlocks)
      throw DataError(name_, ": its blocks are nested deeper than ", kMaxBlocks,
                      " levels; expected what torch.jit.save writes");
    at_ = text;
  }

  static constexpr size_t kMaxBlocks = 250;  // a block takes more of the stack than an expression
  struct Block {
    size_t indent, num_elifs;
  };

  std::string_view code_;
  const std::string& name_;
  size_t at_ = 0;
  std::vector<int> levels_ = {0};  // by open bracket: operators since its last comma
  int depth_ = 0;                  // their sum
  std::vector<Block> blocks_;
};

}  // namespace

void check_pickle(std::string_view pickle, const std::string& name) { PickleScan(pickle, name).run(); }
void check_code(std::string_view code, const std::string& name) { CodeScan(code, name).run(); }

}  // namespace tessera::examples

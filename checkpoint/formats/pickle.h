// Pickle: reads a pickle as data. Nothing is imported and nothing is called.
//
// The machine of Python's pickle (Lib/pickletools.py has its opcodes; protocols 2 to 5) makes values of
// lists, numbers and texts. Whatever it would look up (GLOBAL, STACK_GLOBAL) is a value of its name,
// and whatever it would call (REDUCE, NEWOBJ, NEWOBJ_EX, OBJ, BUILD) is a record of the name, the
// arguments and the state. So a file can say what it likes: it is only read.
//
// Calls that only make a value of plain data are that value: OrderedDict, defaultdict, Counter, dict, list,
// tuple, set, frozenset, bytearray, bytes, torch.Size, _codecs.encode(TEXT, "latin1"), and numpy's scalars of
// booleans, numbers of up to 64 bits and texts (numpy_value.h has its arrays). Names of Python 2
// (__builtin__, copy_reg) are those of Python 3. Python 3.11 writes a member of an enum as getattr(CLASS,
// "NAME"): it is the kGlobal "CLASS.NAME". Other versions write the call CLASS(VALUE), a kObject.
//
// A file that would call something that is no data is refused, because it is an attack, or for a program that
// we do not know: [Note: what a pickle may name] in pickle.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_error.h"

namespace tessera::checkpoint {

/// Reports a pickle that goes on behind the bytes that were given.
class PickleEndsEarly : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// A value of a pickle. Values refer to each other by address, and may refer to themselves by way of others:
/// who walks through them keeps count of the depth.
struct PickleValue {
  enum class Kind : uint8_t {
    kNone,
    kBool,        ///< `integer`: 0 or 1
    kInt,         ///< `integer`
    kLong,        ///< an integer that 64 bits do not hold: `text` has its decimal digits
    kFloat,       ///< `number`
    kString,      ///< `text`, UTF-8; a lone surrogate is "\\udc80", as Python's backslashreplace writes it
    kBytes,       ///< `text`: bytes, bytearray; also a str of Python 2 that is no UTF-8
    kList,        ///< `items`
    kTuple,       ///< `items`
    kSet,         ///< `items`; `text`: "builtins.frozenset" of one, else empty
    kDict,        ///< `items`: key, value, key, value, … in the order in which they were set; no text, number
                  ///< or bytes is a key twice. `text`: "collections.OrderedDict", "collections.Counter" of
                  ///< these, else empty. An OrderedDict's own attributes ("_metadata") are `state`.
    kGlobal,      ///< `text`: "torch.float32", "collections.OrderedDict"
    kObject,      ///< a class or function that would be called: `callable`, `arguments`, `state`, `items`
    kPersistent,  ///< `arguments`: what persistent_load would be given
  };
  Kind kind = Kind::kNone;
  bool pairs = false;  ///< of kObject: `items` has key, value, … (a class derived of dict)
  uint16_t depth = 0;  ///< of the values in it: 1 for a value without any
  int64_t integer = 0;
  double number = 0;
  std::string_view text;                   ///< valid as long as the Pickle is
  std::vector<const PickleValue*> items;   ///< kObject: what was appended, or key, value, … that were set
  const PickleValue* callable = nullptr;   ///< a kGlobal
  const PickleValue* arguments = nullptr;  ///< a kTuple, keyword arguments its last item, a kDict; of
                                           ///< kPersistent: any value
  const PickleValue* state = nullptr;      ///< what __setstate__ would be given, or null

  /// "torch._utils._rebuild_tensor_v2" of a kObject whose callable is a global, of a kGlobal its own text;
  /// empty for any other value.
  std::string_view global() const;
  /// The value of a key (a string) of a kDict; of a kObject, of its state (a dict, or a tuple of two:
  /// attributes, slots) or its `items` that are pairs. Null when there is none. Looks at one key after the
  /// other.
  const PickleValue* find(std::string_view key) const;
  /// "a list of 3", "the text 'abc'", "argparse.Namespace": what a message says was found.
  std::string describe() const;
};

struct PickleLimits {
  int64_t max_values = int64_t{1} << 26;
  int64_t max_bytes =
      int64_t{1} << 32;  ///< in memory; also at most 64 MiB and 256 for each byte of the input
  int max_depth = 200;   ///< of values in values; values that refer to themselves count once
};

/// Reads one pickle. Owns its values. Immutable; thread-safe.
class Pickle {
 public:
  /// Reads up to the STOP of the pickle; what follows is not looked at. `source` is the file's name for
  /// messages. Throws CheckpointError: the text is no pickle, ends early, passes a limit, or calls what is no
  /// data (the message names it).
  Pickle(std::span<const std::byte> bytes, const std::string& source, const PickleLimits& limits = {});

  Pickle(const Pickle&) = delete;  // values refer to each other by address
  Pickle& operator=(const Pickle&) = delete;

  const PickleValue& root() const { return *root_; }
  /// Bytes up to and with the STOP.
  int64_t bytes() const { return bytes_; }
  /// Every kPersistent, in the order of the pickle.
  const std::vector<const PickleValue*>& persistent() const { return persistent_; }

 private:
  friend class PickleMachine;
  std::deque<PickleValue> values_;
  std::deque<std::string> texts_;
  std::vector<const PickleValue*> persistent_;
  const PickleValue* root_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace tessera::checkpoint

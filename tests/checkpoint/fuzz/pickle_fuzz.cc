// Bytes as a pickle: refused, or a tree within the limits whose parts fit together.
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "checkpoint/formats/pickle.h"
#include "core/error.h"

namespace {

using tessera::checkpoint::PickleValue;
using Kind = PickleValue::Kind;

void require(bool holds) {
  if (!holds) __builtin_trap();
}

void check(const PickleValue& value, int max_depth) {
  require(value.depth >= 1 && value.depth <= max_depth && !value.describe().empty());
  value.find("a");
  const bool is_dict = value.kind == Kind::kDict || value.pairs;
  require(!is_dict || value.items.size() % 2 == 0);
  require(value.kind != Kind::kObject ||
          (value.callable != nullptr && value.callable->kind == Kind::kGlobal && value.arguments != nullptr &&
           value.arguments->kind == Kind::kTuple));
  require(value.kind != Kind::kPersistent || value.arguments != nullptr);
  require(value.state == nullptr || value.kind == Kind::kObject || value.kind == Kind::kDict);
  for (const PickleValue* item : value.items) require(item != nullptr);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera::checkpoint;
  const PickleLimits limits{.max_values = 1 << 20, .max_bytes = 64 << 20, .max_depth = 50};
  try {
    const Pickle pickle(std::as_bytes(std::span(data, size)), "a.pkl", limits);
    require(pickle.bytes() > 0 && pickle.bytes() <= static_cast<int64_t>(size));
    std::set<const PickleValue*> seen = {&pickle.root()};
    std::vector<const PickleValue*> next = {&pickle.root()};
    while (!next.empty()) {
      const PickleValue& value = *next.back();
      next.pop_back();
      check(value, limits.max_depth);
      const auto add = [&](const PickleValue* inner) {
        if (inner != nullptr && seen.insert(inner).second) next.push_back(inner);
      };
      add(value.callable);
      add(value.arguments);
      add(value.state);
      for (const PickleValue* item : value.items) add(item);
    }
  } catch (const tessera::Error&) {
  }
  return 0;
}

// PerOperator: what one part of the engine has to know of each operator, read from its schema once.
//
// [Note: operators that go]
// An operator is found by the address of its name, which its schema owns: this costs less than its name. When
// a library of operators is destroyed, another operator may get the address. So what is known of an operator
// is forgotten when it goes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::zero {

/// While what it returns lives, `function` is called with the name of each operator that goes, at its
/// address.
[[nodiscard]] c10::RegistrationHandleRAII when_an_operator_goes(
    std::function<void(const char* name)> function);

/// `Facts` are made of a `const c10::OperatorHandle&`. Thread-safe. References are valid until the process
/// ends.
template <class Facts>
class PerOperator {
 public:
  static const Facts& of(const c10::OperatorHandle& op) {
    PerOperator& all = of_process();
    const std::lock_guard lock(all.mutex_);
    std::unique_ptr<const Facts>& facts = all.facts_[op.schema().name().c_str()];
    if (!facts) facts = std::make_unique<const Facts>(op);
    return *facts;
  }
  /// Null for what is no operator of the dispatcher: a block that code marks for profilers.
  static const Facts* of(const at::RecordFunction& function) {
    if (const Facts* const facts = of_process().find(function.name())) return facts;
    const auto name = function.operator_name();
    const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
    return op ? &of(*op) : nullptr;
  }

 private:
  static PerOperator& of_process() {
    static PerOperator& all = *new PerOperator;
    return all;
  }
  const Facts* find(const char* name) {
    const std::lock_guard lock(mutex_);
    const auto found = facts_.find(name);
    return found == facts_.end() ? nullptr : found->second.get();
  }
  PerOperator() = default;

  std::mutex mutex_;  // guards what follows
  std::unordered_map<const char*, std::unique_ptr<const Facts>> facts_;
  std::vector<std::unique_ptr<const Facts>> gone_;
  const c10::RegistrationHandleRAII listens_ = when_an_operator_goes([this](const char* name) {
    const std::lock_guard lock(mutex_);
    if (auto entry = facts_.extract(name)) gone_.push_back(std::move(entry.mapped()));
  });
};

}  // namespace tessera::zero

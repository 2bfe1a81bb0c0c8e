// OperatorFacts: what recomputation has to know of an operator, read from its schema and tags once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::activations {

struct OperatorFacts {
  std::string name;                         ///< "aten::gelu"
  std::optional<c10::OperatorHandle> call;  ///< unset: not an operator of the dispatcher
  size_t num_arguments = 0;
  uint64_t written_arguments = 0;  ///< one bit each
  bool composite = false;          ///< only calls other operators, which are heard themselves
  bool random = false;             ///< draws from a generator
  int generator_argument = -1;     ///< where it takes one
  bool cheap = false;  ///< costs bytes rather than FLOPs: elementwise, norms, casts, copies, views
  /// Calling it again has the same result and changes nothing else.
  bool repeatable = false;
  /// Arguments that it writes without its schema saying so, when argument `training_argument` is true: the
  /// running statistics of batch norms. Left out when it is repeated.
  int first_statistic = -1;
  int training_argument = -1;

  /// It writes one argument (and returns it): an in-place operator.
  bool in_place() const { return written_arguments != 0; }
};

/// Local. Thread-safe; the reference is valid until the process ends.
const OperatorFacts& facts_of(const at::RecordFunction& function);

}  // namespace tessera::activations

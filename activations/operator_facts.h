// OperatorFacts: what recomputation has to know of an operator, read from its schema and tags once.
//
// [Note: what is known]
// An operator runs again in backward only if it is known: it is one of libtorch's own, its schema says that
// it writes nothing (or only the one argument that it returns), and a reviewed list (operator_facts.cc), a
// tag (pointwise) or its being a view says that equal arguments and an equal state of its generator give
// equal bits. Nothing is assumed of other operators: what they make is kept. Those of other namespaces
// (torch.library, extensions, c10d) may hide anything, so the operators that they call are not recorded
// either.
//
// Memory that is only allocated, or filled with one value, is often filled later by code that calls no
// operator (numpy, an extension's kernel). So empty(), zeros(), full(), fill_() and the like are never run
// again. An operator that overwrites all of its argument (bernoulli_, copy_) needs its shape alone, and is.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zero/operators/tap.h"

namespace tessera::activations {

struct OperatorFacts {
  explicit OperatorFacts(const c10::OperatorHandle& op);
  /// Of what nothing is known.
  explicit OperatorFacts(std::string name_) : name(std::move(name_)), opaque(true) {}

  std::string name;                         ///< "aten::gelu"
  std::optional<c10::OperatorHandle> call;  ///< unset: not an operator of the dispatcher
  size_t num_arguments = 0;
  /// Arguments that it writes, one bit each: as the schema says, the running statistics of batch norms, of
  /// which it does not, and all, where the schema says nothing that can be relied on (c10d).
  uint64_t written_arguments = 0;
  int in_place_argument = -1;   ///< the one that is written and returned; -1: none, or more
  bool overwrites = false;      ///< it does not read that argument
  bool composite = false;       ///< only calls other operators, which are heard themselves
  bool opaque = false;          ///< of another namespace: what it calls is not recorded
  bool random = false;          ///< draws from a generator
  int generator_argument = -1;  ///< where it takes one
  bool cheap = false;           ///< costs bytes rather than FLOPs: elementwise, norms, casts, copies, views
  /// Calling it again has the same result and changes nothing else: see [Note: what is known].
  bool repeatable = false;
  /// Not repeatable on CUDA, where threads add in any order, unless torch.use_deterministic_algorithms().
  bool adds_in_any_order_on_cuda = false;
  /// The running statistics of a batch norm, two arguments from here on. It writes them when argument
  /// `training_argument` is true, and they are left out when it is repeated.
  int first_statistic = -1;
  int training_argument = -1;
};

/// Null for what is no operator of the dispatcher and no graph of torch.compile. Thread-safe; valid until the
/// process ends.
const OperatorFacts* facts_of(const zero::OperatorCall& call);

/// The tensors that the operator is about to write, lists flattened.
std::vector<at::Tensor> written_tensors(const OperatorFacts& facts, c10::ArrayRef<const c10::IValue> inputs);

/// The names of all operators that are registered now ("aten::gelu"), each once.
std::vector<std::string> operator_names();

}  // namespace tessera::activations

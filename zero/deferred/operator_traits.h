// What recording has to know of an operator, read from its schema, its tags and its kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace tessera::zero::deferred {

enum class OperatorKind {
  kComposite,      ///< calls other operators, and touches no memory itself
  kView,           ///< returns views, or changes the shape of its argument, and touches no memory
  kResize,         ///< changes shape, strides or storage of its first argument, and may allocate
  kUninitialized,  ///< makes a tensor without values
  kOpaque,   ///< has to run at once: its result depends on values, or it does what its schema doesn't say
  kCompute,  ///< all others
};

/// To be had of PerOperator (zero/operators/per_operator.h).
struct OperatorTraits {
  explicit OperatorTraits(const c10::OperatorHandle& op);

  OperatorKind kind = OperatorKind::kCompute;
  bool random = false;         ///< draws from a generator
  int generator = -1;          ///< the argument that is one
  int device = -1;             ///< the argument that is one
  std::vector<bool> written;   ///< by argument
  std::vector<bool> not_read;  ///< by argument: written without having been read
  /// Has, by return value, the argument that it is, or -1 for a tensor of its own.
  std::vector<int> returns;
  bool only_writes = false;  ///< returns nothing of its own
};

}  // namespace tessera::zero::deferred

// The tap: one callback of at::RecordFunction, by which all parts of the engine hear the operators of this
// process. libtorch's C++ modules have no forward hooks; at::RecordFunction is the one place that all
// operators, forward and backward, of C++, Python and TorchScript, pass through.
//
// An operator is heard by one observer after the other, in the order of Turn when it begins, and in the
// other order when it ends: the Residency gathers what an operator reads before its digest is taken, and
// releases it after its result is known. Operators nest within a thread.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "zero/memory/pause_listening.h"

namespace tessera::zero {

/// An operator, a graph of torch.compile, or a node of backward, that begins or ends. Blocks that code marks
/// for profilers are none; neither is Tensor::backward(), in which all of backward would be nested.
class OperatorCall {
 public:
  enum class Kind {
    kOperator,
    kGraph,           ///< of torch.compile, a forward: see [Note: compiled graphs] in compiled_graphs.h
    kAnnouncedGraph,  ///< by CompiledGraphRead
    kNode,            ///< of backward
  };
  /// Unset for what is none of these.
  static std::optional<OperatorCall> of(const at::RecordFunction& function);

  Kind kind() const { return kind_; }
  bool is_graph() const { return kind_ == Kind::kGraph || kind_ == Kind::kAnnouncedGraph; }
  bool is_node() const { return kind_ == Kind::kNode; }
  const char* name() const { return function_.name(); }  ///< "aten::gelu"
  const at::RecordFunction& function() const { return function_; }
  c10::ArrayRef<const c10::IValue> inputs() const { return function_.inputs(); }  ///< while it begins
  const std::vector<c10::IValue>& outputs() const { return function_.outputs(); }

 private:
  OperatorCall(Kind kind, const at::RecordFunction& function) : kind_(kind), function_(function) {}

  Kind kind_;
  const at::RecordFunction& function_;
};

/// Hears the operators of all threads. An error that it throws is lost: libtorch swallows it.
class OperatorObserver {
 public:
  /// What it returns is given to end(), on the same thread.
  virtual std::unique_ptr<at::ObserverContext> begin(const OperatorCall& call) = 0;
  virtual void end(const OperatorCall& call, at::ObserverContext* context) = 0;

 protected:
  ~OperatorObserver() = default;
};

/// The order of the observers.
enum class Turn { kResidency, kRecording, kFlops, kOrigin };
inline constexpr size_t kNumTurns = 4;

/// What an observer needs beside operators and their inputs; each costs a little.
struct Needs {
  bool outputs = false;
  bool nodes = false;  ///< of backward
  bool operator==(const Needs&) const = default;
};

/// While one lives, an observer hears operators. Several may live for one, and may need different things.
class Hearing {
 public:
  /// `observer`: always the same one in this turn; it lives until the process ends.
  Hearing(Turn turn, OperatorObserver& observer, Needs needs);
  ~Hearing();
  Hearing(const Hearing&) = delete;
  Hearing& operator=(const Hearing&) = delete;

 private:
  Turn turn_;
  Needs needs_;
};

/// While one lives, no observer and no mode hears the operators of this thread: they are the engine's own. As
/// PauseListening, which is for longer work: entering and leaving that makes libtorch rebuild its lists of
/// callbacks for every scope, 0.7 us in all, while an operator whose units are unsharded costs a seventh of
/// that. Other threads need none: what they get of a unit for a collective is a view of plain memory
/// (comm/gloo/gloo.cc), which find_unit does not know.
class OurOwnOperators {
 public:
  OurOwnOperators();
  ~OurOwnOperators();
  OurOwnOperators(const OurOwnOperators&) = delete;

 private:
  bool before_;
  BelowModes below_modes_;
};

/// While one lives, the operators of this thread repeat what was computed before: they read parameters, but
/// are no part of the model's forward.
class RepeatedOperators {
 public:
  RepeatedOperators();
  ~RepeatedOperators();
  RepeatedOperators(const RepeatedOperators&) = delete;
  static bool on_this_thread();

 private:
  bool before_;
};

}  // namespace tessera::zero

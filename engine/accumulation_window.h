// AccumulationWindow: where a backward() stands between two updates, and what became of its gradients.
#pragma once

#include <cstdint>
#include <optional>

#include "core/check.h"

namespace tessera {

/// Follows the calls of backward(), step() and zero_grad() from one update to the next. The first backward()
/// of a window begins its gradients, the last one makes them complete, and step() then updates. It computes
/// nothing and is not collective; ranks that make the same calls have the same window. Not thread-safe.
class AccumulationWindow {
 public:
  enum class Gradients {
    kNone,         ///< no backward() since the last update
    kAccumulated,  ///< of the micro-steps so far; more are to come
    kDiscarded,    ///< discard() or give_up() was called, and no backward() came since
    kComplete,     ///< of all micro-steps; step() is to come
  };

  /// `num_micro_steps`: backward() calls of a window. `managed`: `managed_gradient_accumulation`; where it is
  /// false no backward() is the last one, and each step() updates with what has been accumulated.
  AccumulationWindow(int64_t num_micro_steps, bool managed)
      : num_micro_steps_(num_micro_steps), managed_(managed) {}

  Gradients gradients() const { return gradients_; }
  bool has_gradients() const {
    return gradients_ == Gradients::kAccumulated || gradients_ == Gradients::kComplete;
  }
  bool is_complete() const { return gradients_ == Gradients::kComplete; }
  int64_t micro_steps() const { return micro_steps_; }  ///< backward() calls so far
  /// Whether step() would update.
  bool update_is_due() const { return is_complete() || (!managed_ && gradients_ == Gradients::kAccumulated); }
  /// Whether step() was called after the last backward().
  bool stepped() const { return phase_ == Phase::kStepped; }
  bool next_is_first() const { return !has_gradients(); }
  bool next_is_last() const {
    if (!managed_ || in_no_sync()) return false;
    return follows_no_sync_ || set_last_.value_or(micro_steps_ + 1 == num_micro_steps_);
  }
  /// Whether the current micro-step is the window's last. A micro-step ends with step() or with the next
  /// forward.
  bool is_boundary() const { return is_complete() || (phase_ != Phase::kAfterBackward && next_is_last()); }
  /// Whether a backward of this kind would add to gradients of the other kind. `callers`: it is
  /// loss.backward().
  bool mixes(bool callers) const { return !next_is_first() && callers != callers_ && num_micro_steps_ > 1; }

  void begin_forward() {
    if (phase_ == Phase::kAfterBackward) phase_ = Phase::kNextForward;
  }
  void begin_backward(bool callers) {
    gradients_ = next_is_last() ? Gradients::kComplete : Gradients::kAccumulated;
    callers_ = callers;
    ++micro_steps_;
    phase_ = Phase::kAfterBackward;
  }
  /// Accumulated gradients are taken as complete: they were reduced before the window's last backward().
  void complete() { gradients_ = Gradients::kComplete; }
  /// step() was called, whether it updates or not.
  void end_micro_step() { phase_ = Phase::kStepped; }
  /// zero_grad() was called. Returns whether it has discarded complete gradients, and so ended the window.
  /// What a step() that does not update has left is to be accumulated, and stays.
  bool discard() {
    if (stepped() || micro_steps_ == 0) return false;
    const bool ends = is_complete();
    gradients_ = Gradients::kDiscarded;
    if (ends) end_window();
    return ends;
  }
  /// The update was made.
  void close() {
    gradients_ = Gradients::kNone;
    phase_ = Phase::kStepped;
    end_window();
  }
  /// All gradients were dropped, also those of the last update: after a failure, or because a checkpoint was
  /// loaded or a step refused.
  void give_up() {
    close();
    gradients_ = Gradients::kDiscarded;
  }

  /// From now on the next backward() is the window's last, or is not; unset: the configured number counts
  /// again.
  void set_last(std::optional<bool> is_last) {
    set_last_ = is_last;
    if (!in_no_sync()) follows_no_sync_ = false;
  }
  /// Until end_no_sync(), no backward() is the last one. Calls may be nested.
  void begin_no_sync() { ++no_sync_depth_; }
  /// `next_is_last`: the first backward() after the outermost no_sync is its window's last.
  void end_no_sync(bool next_is_last) {
    TESSERA_CHECK(in_no_sync());
    --no_sync_depth_;
    if (!in_no_sync()) follows_no_sync_ = next_is_last;
  }
  bool in_no_sync() const { return no_sync_depth_ > 0; }

 private:
  enum class Phase { kAfterBackward, kNextForward, kStepped };

  void end_window() {
    micro_steps_ = 0;
    follows_no_sync_ = false;
  }

  const int64_t num_micro_steps_;
  const bool managed_;
  Gradients gradients_ = Gradients::kNone;
  Phase phase_ = Phase::kStepped;
  int64_t micro_steps_ = 0;
  bool callers_ = false;          ///< the gradients so far are of loss.backward()
  std::optional<bool> set_last_;  ///< in place of the configured number of micro-steps
  int no_sync_depth_ = 0;
  bool follows_no_sync_ = false;  ///< the window ends with the first backward() after no_sync
};

}  // namespace tessera

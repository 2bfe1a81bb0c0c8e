// RandomStream: one generator as the making of a model uses it. Recording writes down what is drawn, in
// order; later each draw is made with the state that the generator would have had, in any order of draws.
//
// [Note: the state of a generator while a model is made]
// While operators are recorded nothing is drawn, so the generator's own state has no meaning. It is set to a
// mark of its own after each recorded draw. What is found before the next draw tells what happened in
// between: the last mark, nothing; an older mark, somebody has put a saved state back; a mark from which
// numbers were drawn, somebody drew from the generator without an operator, which cannot be put off; anything
// else, somebody has seeded it or set its state, and that is the state from here on.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

namespace tessera::zero::deferred {

/// Not thread-safe; while a model is made, one stream of the process marks a generator.
class RandomStream {
 public:
  /// Local. Begins with the state that the generator has.
  explicit RandomStream(at::Generator generator);

  const at::Generator& generator() const { return generator_; }

  // -- recording --
  /// Local. A draw that comes next; returns its number. Throws Error when numbers were drawn without an
  /// operator.
  int record();
  /// Local. A draw that cannot be put off: `draw` is called with the generator in the state that it would
  /// have. First makes all draws before it, as reach().
  void draw_now(const std::function<void()>& draw, const std::function<void(int)>& pass);
  /// Local. Nothing more is drawn. The generator gets the state back that it had at first. Throws as
  /// record().
  void end_recording();
  /// Local. The generator gets the state back that it had at first.
  void restore() { set_state(generator_, initial_); }

  // -- drawing --
  /// The generator to draw from: one of our own.
  const at::Generator& own() const { return own_; }
  /// Local. Whether a draw's state will be asked for again once it has been passed.
  std::function<bool(int)> wanted;
  /// Local. Calls `body` with own() in the state before `draw`. All draws before it that have not been made
  /// yet are made first, by pass(number), which draws from own().
  void at_draw(int draw, const std::function<void()>& body, const std::function<void(int)>& pass);
  /// Local. Calls `body` with the program's generator in own()'s state, which moves on as far: for operators
  /// that take no generator.
  void lend(const std::function<void()>& body);
  /// Local. Makes all draws that are left, and returns the generator's state after the last.
  at::Tensor finish(const std::function<void(int)>& pass);

  int num_draws() const { return static_cast<int>(draws_.size()); }
  const at::Tensor& initial_state() const { return initial_; }
  /// Local. Sets the generator's state.
  void set_final(const at::Tensor& state) { set_state(generator_, state); }

 private:
  /// What the state is before a draw: a given one, or the one after another draw (-1: at first).
  struct Before {
    std::optional<at::Tensor> given;
    int after = -1;
  };
  struct Draw {
    Before before;
    at::Tensor saved;  // the state before it, once it was passed
    at::Tensor state_after;
    bool is_restored = false;  // a later draw needs state_after
  };
  static at::Tensor state_of(const at::Generator& generator);
  static void set_state(const at::Generator& generator, const at::Tensor& state);
  Before observe();
  void mark(int draw);
  void reach(int draw, const std::function<void(int)>& pass);
  void prepare(const Before& before, int next);
  void passed(int draw);

  at::Generator generator_, own_;
  at::Tensor initial_;
  std::vector<Draw> draws_;
  at::Tensor last_mark_;
  Before end_;
  bool recording_ = true;
  int position_ = 0;  // the next draw that has not been made
};

}  // namespace tessera::zero::deferred

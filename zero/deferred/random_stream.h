// RandomStream: one generator as the making of a model uses it. Recording writes down what is drawn, in
// order; later each draw is made with the state that the generator would have had, in any order of draws.
//
// [Note: the state of a generator while a model is made]
// While operators are recorded nothing is drawn, so the generator's own state stays behind. Whoever asks for
// it (get_state(), clone(); Python: torch.get_rng_state(), fork_rng() ...) has to see the state of ordinary
// making: then the recorded draws are made, on scratch memory, and the generator is settled: it has its real
// state until the next recorded draw. Such calls are virtual functions of GeneratorImpl. A class of ours
// overrides them, and the generator has that class's table of virtual functions while the model is made. Its
// seed is always right, because drawing does not change it.
//
// Numbers may also be drawn by a function that is not virtual (CPUGeneratorImpl::random()). So after each
// recorded draw the generator has a state that means nothing, a mark. If the mark has changed when the state
// is needed next, somebody has drawn from it, which cannot be put off.
//
// Only generators of the CPU are watched in this way. Others, CUDA's, are settled after each recorded draw.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

namespace tessera::zero::deferred {

/// Gives a generator's draws out of order the values that they have in order. Used by one thread. While a
/// model is made, one stream of the process watches a generator.
class RandomStream {
 public:
  /// Makes a draw on scratch memory, from own().
  using MakeDraw = std::function<void(int)>;

  /// Begins with the state that the generator has. `make_draw`: is called for a draw that is passed over.
  RandomStream(at::Generator generator, MakeDraw make_draw);
  ~RandomStream();
  RandomStream(const RandomStream&) = delete;

  const at::Generator& generator() const { return generator_; }

  // -- recording --
  /// A draw that comes next; returns its number. Throws Error when numbers were drawn without an
  /// operator.
  int record();
  /// Makes the recorded draws, and gives the generator the state after them. Throws as record().
  void settle();
  /// Whether the generator has to be settled after each recorded draw.
  bool settles_each_draw() const { return table_ == nullptr; }
  /// Nothing more is drawn. The generator gets the state back that it had at first. Throws as
  /// record().
  void end_recording();
  /// The generator gets the state back that it had at first.
  void restore();

  // -- drawing --
  /// The generator to draw from: one of our own.
  const at::Generator& own() const { return own_; }
  /// Whether a draw's state will be asked for again once it has been passed.
  std::function<bool(int)> wanted;
  /// Calls `body` with own() in the state before `draw`. All draws before it that have not been made
  /// yet are passed over first.
  void at_draw(int draw, const std::function<void()>& body);
  /// Calls `body` with the program's generator in own()'s state, which moves on as far: for operators
  /// that take no generator.
  void lend(const std::function<void()>& body);
  /// Passes over all draws that are left, and returns the generator's state after the last.
  at::Tensor finish();

  int num_draws() const { return static_cast<int>(draws_.size()); }
  const at::Tensor& initial_state() const { return initial_; }
  /// Sets the generator's state.
  void set_final(const at::Tensor& state);

 private:
  class Watched;
  struct Draw {
    std::optional<at::Tensor> given;  // the state before it; nothing: the one after the draw before it
    at::Tensor saved;                 // the state before it, once it was passed
  };
  static RandomStream* of(const c10::GeneratorImpl* generator);
  at::CPUGeneratorImpl& cpu() const;
  at::Tensor state() const;
  void set_state(const at::Tensor& state);
  void watch();
  void unwatch();
  void mark();
  void check_mark() const;
  std::optional<at::Tensor> state_if_settled() const;
  void settle_locked();
  void reach(int draw);
  void prepare(int draw);

  at::Generator generator_, own_;
  MakeDraw make_draw_;
  at::Tensor initial_;
  std::vector<Draw> draws_;
  const void* table_ = nullptr;  // the generator's own virtual functions, while ours are in their place
  bool settled_ = true;          // the generator has its real state
  bool asked_ = false;           // within a virtual function, whose caller holds the generator's mutex
  at::Tensor last_mark_;
  std::optional<at::Tensor> end_;
  int position_ = 0;  // the next draw that has not been made
};

}  // namespace tessera::zero::deferred

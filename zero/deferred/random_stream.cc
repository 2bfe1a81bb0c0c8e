#include "zero/deferred/random_stream.h"

#include <cstring>
#include <mutex>
#include <utility>

#include "core/check.h"
#include "core/error.h"

namespace tessera::zero::deferred {
namespace {

constexpr uint64_t kMark = 0x7e55e7a1'00000000;
constexpr uint64_t kMarkBits = 0xffffffff'00000000;

bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

at::Tensor RandomStream::state_of(const at::Generator& generator) {
  at::Generator locked = generator;
  const std::lock_guard lock(locked.mutex());
  return locked.get_state();
}

void RandomStream::set_state(const at::Generator& generator, const at::Tensor& state) {
  at::Generator locked = generator;
  const std::lock_guard lock(locked.mutex());
  locked.set_state(state);
}

RandomStream::RandomStream(at::Generator generator)
    : generator_(std::move(generator)), own_(generator_.clone()), initial_(state_of(generator_)) {}

void RandomStream::mark(int draw) {
  const std::lock_guard lock(generator_.mutex());
  generator_.set_current_seed(kMark | static_cast<uint64_t>(draw));
  last_mark_ = generator_.get_state();
}

/// See [Note: the state of a generator while a model is made].
RandomStream::Before RandomStream::observe() {
  const at::Tensor state = state_of(generator_);
  const int last = num_draws() - 1;
  if (last < 0) return same_state(state, initial_) ? Before{} : Before{state, -1};
  if (same_state(state, last_mark_)) return {std::nullopt, last};
  const uint64_t seed = generator_.current_seed();
  if ((seed & kMarkBits) != kMark) return {state, -1};
  const auto draw = static_cast<int>(seed & ~kMarkBits);
  at::Generator fresh = generator_.clone();
  fresh.set_current_seed(seed);
  if (draw > last || !same_state(state, fresh.get_state()))
    throw Error("numbers were drawn from a generator without an operator of libtorch");
  draws_[draw].is_restored = true;
  TESSERA_CHECK(draw >= position_ || draws_[draw].state_after.defined());
  return {std::nullopt, draw};
}

int RandomStream::record() {
  draws_.push_back({observe(), {}, {}});
  mark(num_draws() - 1);
  return num_draws() - 1;
}

void RandomStream::lend(const std::function<void()>& body) {
  const at::Tensor mine = state_of(generator_);
  set_state(generator_, state_of(own_));
  body();
  set_state(own_, state_of(generator_));
  set_state(generator_, mine);
}

void RandomStream::draw_now(const std::function<void()>& draw, const std::function<void(int)>& pass) {
  const int number = record();
  at_draw(number, [&] { lend(draw); }, pass);
}

void RandomStream::end_recording() {
  recording_ = false;
  // Without a draw the generator is as it is in eager making.
  if (draws_.empty()) {
    initial_ = state_of(generator_);
    return;
  }
  end_ = observe();
  restore();
}

void RandomStream::prepare(const Before& before, int next) {
  if (before.given) {
    set_state(own_, *before.given);
  } else if (before.after < 0) {
    set_state(own_, initial_);
  } else if (before.after != next - 1) {
    set_state(own_, draws_[before.after].state_after);
  }
}

void RandomStream::passed(int draw) {
  // While recording, the program may have saved this state, and put it back later: each is kept (5 KB).
  if (recording_ || draws_[draw].is_restored) draws_[draw].state_after = state_of(own_);
  position_ = draw + 1;
}

void RandomStream::reach(int draw, const std::function<void(int)>& pass) {
  while (position_ < draw) {
    const int number = position_;
    prepare(draws_[number].before, number);
    if (!wanted || wanted(number)) draws_[number].saved = state_of(own_);
    pass(number);
    if (position_ == number) passed(number);
  }
}

void RandomStream::at_draw(int draw, const std::function<void()>& body,
                           const std::function<void(int)>& pass) {
  reach(draw, pass);
  if (draw == position_) {
    prepare(draws_[draw].before, draw);
    body();
    return passed(draw);
  }
  TESSERA_CHECK(draws_[draw].saved.defined());
  const at::Tensor now = state_of(own_);
  set_state(own_, draws_[draw].saved);
  body();
  set_state(own_, now);
}

at::Tensor RandomStream::finish(const std::function<void(int)>& pass) {
  if (draws_.empty()) return initial_;
  reach(num_draws(), pass);
  prepare(end_, num_draws());
  return state_of(own_);
}

}  // namespace tessera::zero::deferred

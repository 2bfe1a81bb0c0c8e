#include "zero/deferred/random_stream.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <typeinfo>
#include <utility>

#include "core/check.h"
#include "core/error.h"

namespace tessera::zero::deferred {
namespace {

constexpr uint32_t kMark = 0x7e55e7a1;

/// The streams that watch a generator for this thread.
thread_local std::vector<RandomStream*> watching;

bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

at::Tensor state_of(const at::CPUGeneratorImpl& generator) {
  return at::Tensor::wrap_tensor_impl(generator.at::CPUGeneratorImpl::get_state());
}

/// An object's table of virtual functions, which all compilers that libtorch is built by on Linux put first
/// (the Itanium C++ ABI).
const void* table_of(const c10::GeneratorImpl& object) {
  const void* table = nullptr;
  std::memcpy(&table, static_cast<const void*>(&object), sizeof(table));
  return table;
}

void set_table(c10::GeneratorImpl& object, const void* table) {
  std::memcpy(static_cast<void*>(&object), static_cast<const void*>(&table), sizeof(table));
}

}  // namespace

/// See [Note: the state of a generator while a model is made]. Callers hold the generator's mutex, so nothing
/// here locks it.
class RandomStream::Watched final : public at::CPUGeneratorImpl {
 public:
  static const void* table() {
    static const Watched& example = *new Watched;
    return table_of(example);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    settle();
    return at::CPUGeneratorImpl::get_state();
  }
  void set_state(const c10::TensorImpl& state) override {
    check();
    at::CPUGeneratorImpl::set_state(state);
    settled();
  }
  void set_current_seed(uint64_t seed) override {
    check();
    at::CPUGeneratorImpl::set_current_seed(seed);
    settled();
  }

 private:
  at::CPUGeneratorImpl* clone_impl() const override {
    settle();
    auto* const copy = new at::CPUGeneratorImpl();
    copy->set_state(*at::CPUGeneratorImpl::get_state());
    return copy;
  }
  void settle() const {
    if (RandomStream* const stream = of(this)) stream->settle_locked();
  }
  void check() const {
    if (const RandomStream* const stream = of(this); stream != nullptr && !stream->settled_)
      stream->check_mark();
  }
  void settled() const {
    if (RandomStream* const stream = of(this)) stream->settled_ = true;
  }
};

RandomStream::RandomStream(at::Generator generator, MakeDraw make_draw)
    : generator_(std::move(generator)), make_draw_(std::move(make_draw)) {
  {
    const std::lock_guard lock(generator_.mutex());
    own_ = generator_.clone();
    initial_ = state();
  }
  watch();
}

RandomStream::~RandomStream() { unwatch(); }

RandomStream* RandomStream::of(const c10::GeneratorImpl* generator) {
  const auto found = std::find_if(watching.begin(), watching.end(), [&](const RandomStream* stream) {
    return stream->generator_.unsafeGetGeneratorImpl() == generator;
  });
  return found == watching.end() ? nullptr : *found;
}

at::CPUGeneratorImpl& RandomStream::cpu() const {
  return static_cast<at::CPUGeneratorImpl&>(*generator_.unsafeGetGeneratorImpl());
}

/// The state that the generator itself has.
at::Tensor RandomStream::state() const {
  return table_ != nullptr ? state_of(cpu()) : generator_.get_state();
}

void RandomStream::set_state(const at::Tensor& state) {
  if (table_ != nullptr)
    cpu().at::CPUGeneratorImpl::set_state(*state.unsafeGetTensorImpl());
  else
    generator_.set_state(state);
}

void RandomStream::watch() {
  static_assert(sizeof(Watched) == sizeof(at::CPUGeneratorImpl));
  c10::GeneratorImpl& generator = *generator_.unsafeGetGeneratorImpl();
  if (typeid(generator) != typeid(at::CPUGeneratorImpl)) return;
  watching.push_back(this);
  table_ = table_of(generator);
  set_table(generator, Watched::table());
}

void RandomStream::unwatch() {
  if (table_ == nullptr) return;
  set_table(*generator_.unsafeGetGeneratorImpl(), std::exchange(table_, nullptr));
  std::erase(watching, this);
}

void RandomStream::mark() {
  at::mt19937 engine = cpu().engine();
  at::mt19937_data_pod data = engine.data();
  data.state_.fill(0);
  data.state_[0] = kMark;
  data.state_[1] = static_cast<uint32_t>(draws_.size());
  data.left_ = 1;
  data.next_ = 0;
  engine.set_data(data);
  cpu().set_engine(engine);
  cpu().set_next_float_normal_sample(std::nullopt);
  cpu().set_next_double_normal_sample(std::nullopt);
  last_mark_ = state();
}

void RandomStream::check_mark() const {
  if (table_ != nullptr && !same_state(state(), last_mark_))
    throw Error("numbers were drawn from a generator without an operator of libtorch");
}

std::optional<at::Tensor> RandomStream::state_if_settled() const {
  if (settled_) return state();
  check_mark();
  return std::nullopt;
}

int RandomStream::record() {
  const std::lock_guard lock(generator_.mutex());
  draws_.push_back({state_if_settled(), {}});
  settled_ = false;
  if (table_ != nullptr) mark();
  return num_draws() - 1;
}

void RandomStream::settle_locked() {
  if (settled_) return;
  check_mark();
  asked_ = true;
  const auto no_longer = c10::make_scope_exit([this] { asked_ = false; });
  reach(num_draws());
  set_state(own_.get_state());
  settled_ = true;
}

void RandomStream::settle() {
  if (settled_) return;
  {
    const std::lock_guard lock(generator_.mutex());
    check_mark();
  }
  reach(num_draws());
  const std::lock_guard lock(generator_.mutex());
  set_state(own_.get_state());
  settled_ = true;
}

void RandomStream::lend(const std::function<void()>& body) {
  if (asked_)
    throw Error(
        "the state of a generator was asked for after an operator that draws from it without naming it");
  at::Tensor mine;
  {
    const std::lock_guard lock(generator_.mutex());
    mine = state();
    set_state(own_.get_state());
  }
  body();
  const std::lock_guard lock(generator_.mutex());
  own_.set_state(state());
  set_state(mine);
}

void RandomStream::end_recording() {
  const std::lock_guard lock(generator_.mutex());
  end_ = state_if_settled();
  // Without a recorded draw the generator is as it is in ordinary making.
  if (!draws_.empty()) set_state(initial_);
  unwatch();
}

void RandomStream::restore() {
  const std::lock_guard lock(generator_.mutex());
  set_state(initial_);
  unwatch();
}

void RandomStream::set_final(const at::Tensor& state) {
  const std::lock_guard lock(generator_.mutex());
  set_state(state);
}

/// own() gets the state before the next draw that has not been made.
void RandomStream::prepare(int draw) {
  TESSERA_CHECK(draw == position_);
  if (draws_[draw].given) own_.set_state(*draws_[draw].given);
}

void RandomStream::reach(int draw) {
  while (position_ < draw) {
    const int number = position_;
    prepare(number);
    if (!wanted || wanted(number)) draws_[number].saved = own_.get_state();
    make_draw_(number);
    if (position_ == number) position_ = number + 1;
  }
}

void RandomStream::at_draw(int draw, const std::function<void()>& body) {
  reach(draw);
  if (draw == position_) {
    prepare(draw);
    body();
    position_ = draw + 1;
    return;
  }
  TESSERA_CHECK(draws_[draw].saved.defined());
  const at::Tensor now = own_.get_state();
  own_.set_state(draws_[draw].saved);
  body();
  own_.set_state(now);
}

at::Tensor RandomStream::finish() {
  if (!draws_.empty()) reach(num_draws());
  return end_ ? *end_ : own_.get_state();
}

}  // namespace tessera::zero::deferred

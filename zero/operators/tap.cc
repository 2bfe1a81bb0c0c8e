#include "zero/operators/tap.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "zero/operators/compiled_graphs.h"

namespace tessera::zero {
namespace {

using Turns = uint8_t;  // a bit each
constexpr Turns bit(size_t turn) { return static_cast<Turns>(1 << turn); }

/// Operators of this thread that have begun and not ended.
struct TapThread {
  std::vector<Turns> begun;  // whose observers have heard it begin
  struct Context {
    size_t place, turn;  // place: in `begun`
    std::unique_ptr<at::ObserverContext> context;
  };
  std::vector<Context> contexts;  // those that are not null
  bool our_own = false, repeated = false;
};
thread_local TapThread tap_thread;

std::array<OperatorObserver*, kNumTurns> observers;  // null: was never heard by
std::atomic<Turns> hearing{0};

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  TapThread& thread = tap_thread;
  if (thread.our_own) return nullptr;
  const auto call = OperatorCall::of(function);
  if (!call) return nullptr;
  const size_t place = thread.begun.size();
  const Turns turns = hearing;
  thread.begun.push_back(turns);
  for (size_t turn = 0; turn < kNumTurns; ++turn)
    if ((turns & bit(turn)) != 0)
      if (auto context = observers[turn]->begin(*call))
        thread.contexts.push_back({place, turn, std::move(context)});
  return nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext*) {
  TapThread& thread = tap_thread;
  if (thread.our_own || thread.begun.empty()) return;
  const auto call = OperatorCall::of(function);
  if (!call) return;
  const Turns turns = thread.begun.back();
  thread.begun.pop_back();
  for (size_t turn = kNumTurns; turn-- > 0;) {
    if ((turns & bit(turn)) == 0) continue;
    std::unique_ptr<at::ObserverContext> context;
    const auto mine = [&] {
      const TapThread::Context& last = thread.contexts.back();
      return last.place == thread.begun.size() && last.turn == turn;
    };
    if (!thread.contexts.empty() && mine()) {
      context = std::move(thread.contexts.back().context);
      thread.contexts.pop_back();
    }
    observers[turn]->end(*call, context.get());
  }
}

/// The callback of the process, to which libtorch's list of callbacks belongs, too.
class Callback {
 public:
  static Callback& of_process() {
    static Callback& callback = *new Callback;
    return callback;
  }

  void change(Turn turn, OperatorObserver* observer, Needs needs, int by) {
    const std::lock_guard lock(mutex_);
    const auto place = static_cast<size_t>(turn);
    num_[place] += by;
    num_outputs_ += needs.outputs ? by : 0;
    num_nodes_ += needs.nodes ? by : 0;
    if (observers[place] == nullptr) observers[place] = observer;  // before it hears: other threads read it
    hearing = static_cast<Turns>(num_[place] > 0 ? hearing | bit(place) : hearing & ~bit(place));
    install();
  }

 private:
  void install() {
    const Needs needs{.outputs = num_outputs_ > 0, .nodes = num_nodes_ > 0};
    const bool is_heard = hearing != 0;
    if (is_heard && handle_ && needs == installed_) return;
    // The new one first: other threads may be in the middle of a model.
    const std::optional<at::CallbackHandle> before = std::exchange(handle_, std::nullopt);
    std::unordered_set<at::RecordScope> scopes{at::RecordScope::FUNCTION};
    if (needs.nodes) scopes.insert(at::RecordScope::BACKWARD_FUNCTION);
    if (is_heard)
      handle_ = at::addGlobalCallback(at::RecordFunctionCallback(on_start, on_end)
                                          .needsInputs(true)
                                          .needsOutputs(needs.outputs)
                                          .scopes(scopes));
    installed_ = needs;
    if (before) at::removeCallback(*before);
  }

  std::mutex mutex_;  // guards what follows
  std::array<int, kNumTurns> num_{};
  int num_outputs_ = 0, num_nodes_ = 0;
  Needs installed_;
  std::optional<at::CallbackHandle> handle_;
};

}  // namespace

std::optional<OperatorCall> OperatorCall::of(const at::RecordFunction& function) {
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) return OperatorCall(Kind::kNode, function);
  constexpr std::string_view kAten = "aten::";
  const char* const name = function.name();
  if (std::strncmp(name, kAten.data(), kAten.size()) == 0) {
    if (std::strcmp(name + kAten.size(), "_backward") == 0) return std::nullopt;
    return OperatorCall(Kind::kOperator, function);
  }
  if (name[0] == 'C' && name == kCompiledForward) return OperatorCall(Kind::kGraph, function);
  if (name[0] == 'C' && name == kCompiledGraphRead) return OperatorCall(Kind::kAnnouncedGraph, function);
  if (function.operator_name().has_value()) return OperatorCall(Kind::kOperator, function);
  return std::nullopt;
}

Hearing::Hearing(Turn turn, OperatorObserver& observer, Needs needs) : turn_(turn), needs_(needs) {
  Callback::of_process().change(turn_, &observer, needs_, 1);
}
Hearing::~Hearing() { Callback::of_process().change(turn_, nullptr, needs_, -1); }

OurOwnOperators::OurOwnOperators() : before_(std::exchange(tap_thread.our_own, true)) {}
OurOwnOperators::~OurOwnOperators() { tap_thread.our_own = before_; }

RepeatedOperators::RepeatedOperators() : before_(std::exchange(tap_thread.repeated, true)) {}
RepeatedOperators::~RepeatedOperators() { tap_thread.repeated = before_; }
bool RepeatedOperators::on_this_thread() { return tap_thread.repeated; }

}  // namespace tessera::zero

// PerOperator, ForwardNotes and the tap: what is known of operators, and who hears them.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <string>

#include "core/str.h"
#include "zero/operators/forward_notes.h"
#include "zero/operators/per_operator.h"
#include "zero/operators/tap.h"

namespace tessera::zero::testing {
namespace {

using ::testing::ElementsAre;

struct Schema {
  explicit Schema(const c10::OperatorHandle& op)
      : text(toString(op.schema())), address(op.schema().name().c_str()) {}
  std::string text;
  const char* address;
};

at::Tensor first(const at::Tensor& x) { return x; }

TEST(PerOperator, AnOperatorThatGetsTheAddressOfOneThatHasGoneIsAnother) {
  const char* address = nullptr;
  int num_same = 0;
  for (int i = 0; i < 100; ++i) {
    const std::string schema = i % 2 == 0 ? "a(Tensor x) -> Tensor" : "b(Tensor(a!) x) -> Tensor(a!)";
    torch::Library library(torch::Library::DEF, "tt", c10::nullopt, __FILE__, __LINE__);
    library.def(torch::schema(schema.c_str()), torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(first)));
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(i % 2 == 0 ? "tt::a" : "tt::b", "");
    const Schema& known = PerOperator<Schema>::of(op);
    EXPECT_EQ(known.text, "tt::" + schema);
    EXPECT_EQ(&PerOperator<Schema>::of(op), &known);
    if (known.address == std::exchange(address, known.address)) ++num_same;
  }
#ifndef __SANITIZE_ADDRESS__  // which does not give an address again
  EXPECT_GT(num_same, 0) << "the case is not the one that the test is about";
#endif
}

/// What is noted is asked for by nodes of backward.
class Notes {
 public:
  void note(int64_t sequence_number, int value) {
    at::RecordFunction forward(at::RecordScope::FUNCTION);
    forward.before("forward", sequence_number);
    notes_.note(forward, [&](int& note) { note = value; });
  }
  std::optional<int> of(int64_t sequence_number) const {
    at::RecordFunction backward(at::RecordScope::BACKWARD_FUNCTION);
    backward.setForwardThreadId(at::RecordFunction::currentThreadId());
    backward.before("backward", sequence_number);
    return notes_.of(backward);
  }

 private:
  ForwardNotes<int> notes_{/*most=*/2};
};

std::unique_ptr<at::ObserverContext> do_nothing(const at::RecordFunction&) { return nullptr; }

TEST(ForwardNotes, TheOldestIsForgottenWhateverItsNumber) {
  const at::CallbackHandle active = at::addThreadLocalCallback(at::RecordFunctionCallback(do_nothing));
  Notes notes;
  notes.note(7, 70);
  notes.note(8, 80);
  notes.note(7, 71);
  notes.note(3, 30);  // as of a thread that has begun later
  EXPECT_EQ(notes.of(7), std::nullopt);
  EXPECT_EQ(notes.of(8), 80);
  EXPECT_EQ(notes.of(3), 30);
  at::removeCallback(active);
}

/// Writes down what it hears.
class Hears final : public OperatorObserver {
 public:
  Hears(std::string name, std::vector<std::string>& events) : name_(std::move(name)), events_(events) {}

  std::unique_ptr<at::ObserverContext> begin(const OperatorCall& call) override {
    events_.push_back(str(name_, " begins ", call.name()));
    return nullptr;
  }
  void end(const OperatorCall& call, at::ObserverContext*) override {
    events_.push_back(str(name_, " ends ", call.name()));
  }

 private:
  const std::string name_;
  std::vector<std::string>& events_;
};

/// Of the process, as observers are.
std::vector<std::string> events;
Hears& flops() {
  static Hears& observer = *new Hears("flops", events);
  return observer;
}
Hears& origin() {
  static Hears& observer = *new Hears("origin", events);
  return observer;
}

TEST(Tap, ObserversHearInTheirOrderAndEndInTheOther) {
  const at::Tensor x = at::ones({2});
  events.clear();
  const Hearing later(Turn::kOrigin, origin(), {});
  const Hearing earlier(Turn::kFlops, flops(), {});
  x.neg();
  EXPECT_THAT(events, ElementsAre("flops begins aten::neg", "origin begins aten::neg",
                                  "origin ends aten::neg", "flops ends aten::neg"));
  events.clear();
  {
    const OurOwnOperators of_the_engine;
    x.neg();
  }
  EXPECT_THAT(events, ElementsAre());
}

TEST(Tap, WhoBeginsToHearInsideOfAnOperatorDoesNotHearItsEnd) {
  const at::Tensor x = at::ones({2});
  events.clear();
  std::optional<Hearing> later;
  {
    const Hearing earlier(Turn::kFlops, flops(), {});
    {
      RECORD_FUNCTION("CompiledGraphRead", std::vector<c10::IValue>({x}));
      later.emplace(Turn::kOrigin, origin(), Needs{});
    }
  }
  x.neg();
  EXPECT_THAT(events, ElementsAre("flops begins CompiledGraphRead", "flops ends CompiledGraphRead",
                                  "origin begins aten::neg", "origin ends aten::neg"));
}

}  // namespace
}  // namespace tessera::zero::testing

#include "engine/accumulation_window.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Gradients = AccumulationWindow::Gradients;

/// A micro-step as a training loop makes it. Returns whether step() would update.
bool micro_step(AccumulationWindow& window, bool callers = false) {
  window.begin_forward();
  window.begin_backward(callers);
  window.end_micro_step();
  const bool due = window.update_is_due();
  if (due) window.close();
  return due;
}

TEST(AccumulationWindow, DiscardedGradientsBeginAnew) {
  AccumulationWindow window(2, true);
  window.begin_backward(false);
  EXPECT_FALSE(window.discard());
  EXPECT_EQ(window.gradients(), Gradients::kDiscarded);
  EXPECT_TRUE(window.next_is_first());
  EXPECT_TRUE(window.next_is_last()) << "the micro-step counts";
  window.begin_backward(false);
  EXPECT_TRUE(window.discard()) << "complete ones end the window";
  EXPECT_EQ(window.micro_steps(), 0);
  EXPECT_FALSE(window.update_is_due());
}

TEST(AccumulationWindow, GivingUpDiscardsWhateverThereIs) {
  AccumulationWindow window(2, true);
  for (const int micro_steps : {0, 1, 2, 3}) {
    for (int i = 0; i < micro_steps; ++i) micro_step(window);
    window.give_up();
    EXPECT_EQ(window.gradients(), Gradients::kDiscarded) << micro_steps;
    EXPECT_EQ(window.micro_steps(), 0) << micro_steps;
    EXPECT_FALSE(window.update_is_due()) << micro_steps;
  }
  EXPECT_FALSE(micro_step(window)) << "a new window begins";
  EXPECT_EQ(window.gradients(), Gradients::kAccumulated);
}

TEST(AccumulationWindow, WhatAStepThatDoesNotUpdateHasLeftStays) {
  AccumulationWindow window(2, true);
  EXPECT_FALSE(micro_step(window));
  EXPECT_FALSE(window.discard());  // the usual loop: backward(), step(), zero_grad()
  EXPECT_EQ(window.gradients(), Gradients::kAccumulated);
  EXPECT_TRUE(micro_step(window));
}

TEST(AccumulationWindow, TwoKindsOfBackwardDoNotMix) {
  AccumulationWindow window(2, true);
  EXPECT_FALSE(window.mixes(true));
  window.begin_backward(/*callers=*/true);
  EXPECT_TRUE(window.mixes(false));
  window.discard();
  EXPECT_FALSE(window.mixes(false));
}

TEST(AccumulationWindow, WhatIsSetInsideOfNoSyncCountsAfterIt) {
  AccumulationWindow window(3, true);
  window.begin_no_sync();
  window.set_last(true);
  EXPECT_FALSE(micro_step(window));
  window.set_last(false);
  window.end_no_sync(true);
  EXPECT_TRUE(micro_step(window)) << "the first one after no_sync";
  EXPECT_FALSE(micro_step(window)) << "then what was set";
}

TEST(AccumulationWindow, AccumulatedGradientsAreCompletedByHand) {
  AccumulationWindow window(4, true);
  window.begin_no_sync();
  window.begin_backward(false);
  window.begin_backward(false);
  window.end_no_sync(/*next_is_last=*/false);
  EXPECT_FALSE(window.next_is_last());
  window.complete();
  EXPECT_TRUE(window.update_is_due());
  window.end_micro_step();
  window.close();
  EXPECT_EQ(window.gradients(), Gradients::kNone);
  EXPECT_EQ(window.micro_steps(), 0);
}

TEST(AccumulationWindow, GivingUpInsideOfNoSyncStaysInIt) {
  AccumulationWindow window(1, true);
  window.begin_no_sync();
  window.begin_backward(false);
  window.give_up();
  EXPECT_TRUE(window.in_no_sync());
  EXPECT_FALSE(window.next_is_last());
  window.end_no_sync(true);
  EXPECT_TRUE(window.next_is_last());
}

}  // namespace
}  // namespace tessera

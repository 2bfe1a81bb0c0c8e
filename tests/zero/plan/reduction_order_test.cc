// The order of a backward's reductions, without units or ranks.
#include "zero/plan/reduction_order.h"

#include <gtest/gtest.h>

namespace tessera::zero {
namespace {

using Units = std::vector<int>;

TEST(ReductionOrder, UnitsAreReducedInTheAgreedOrder) {
  ReductionOrder order({2, 1, 0});
  order.begin_backward();
  EXPECT_EQ(order.next(), 2);
  EXPECT_FALSE(order.next_is_complete());
  order.gradient_complete(0);
  order.gradient_complete(2);
  EXPECT_EQ(order.num_ready(), 2) << "the first backward counts what is complete, in whatever order";
  EXPECT_TRUE(order.next_is_complete());
  order.issued();
  EXPECT_EQ(order.next(), 1);
  EXPECT_FALSE(order.next_is_complete());
  EXPECT_EQ(order.oldest(), 2);
  order.issued();
  EXPECT_EQ(order.in_flight(), 2);
  order.completed();
  EXPECT_EQ(order.oldest(), 1);
  EXPECT_EQ(order.num_completed(), 1);
  order.issued();
  EXPECT_TRUE(order.all_issued());
  EXPECT_EQ(order.completion_order(), (Units{0, 2, 1})) << "what was never complete comes last";
  order.agree(order.completion_order());
  order.end_backward();
  EXPECT_EQ(order.num_ready(), 0) << "outside of backward";

  EXPECT_EQ(order.units(), (Units{0, 2, 1}));
  EXPECT_EQ(order.place_of(2), 1);
  order.begin_backward();
  EXPECT_EQ(order.num_issued(), 0);
  order.gradient_complete(2);
  EXPECT_EQ(order.num_ready(), 0) << "the one before it is not complete";
  order.gradient_complete(0);
  EXPECT_EQ(order.num_ready(), 2);
}

TEST(ReductionOrder, ADroppedBackwardAgreesOnNothing) {
  ReductionOrder order({1, 0});
  order.begin_backward();
  order.gradient_complete(0);
  order.drop_backward();
  EXPECT_FALSE(order.agreed());
  EXPECT_EQ(order.completion_order(), (Units{1, 0}));
}

}  // namespace
}  // namespace tessera::zero

// Model state where the allocator's blocks are larger than the tensors in them, as CUDA's are: what the meter
// counts is the formula and the rounding, which has a bound.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <unordered_map>

#include "comm/init/self.h"
#include "core/str.h"
#include "engine/profile/memory_meter.h"
#include "tests/support/backend.h"
#include "tests/support/listening_allocator.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

constexpr int64_t kBlock = 512, kSegment = 2 << 20;

/// Reports this thread's CPU tensors to libtorch's profiler as CUDA's caching allocator does its own: as
/// blocks of a multiple of 512 bytes, of segments that stay reserved.
class ReportedAsCuda {
 public:
  ReportedAsCuda() {
    ListeningAllocator<ReportedAsCuda>::install();
    current() = this;
  }
  ~ReportedAsCuda() { current() = nullptr; }
  ReportedAsCuda(const ReportedAsCuda&) = delete;

  int64_t reserved() const { return reserved_; }

 private:
  friend ListeningAllocator<ReportedAsCuda>;
  static void took(void* data, int64_t bytes) {
    if (current() == nullptr) return;
    const int64_t size = (std::max<int64_t>(bytes, 1) + kBlock - 1) / kBlock * kBlock;
    current()->blocks_[data] = size;
    current()->report(data, size);
  }
  static void gives_back(void* data) {
    if (current() == nullptr) return;
    if (const auto block = current()->blocks_.extract(data)) current()->report(data, -block.mapped());
  }
  void report(void* data, int64_t bytes) {
    allocated_ += bytes;
    reserved_ = std::max(reserved_, (allocated_ + kSegment - 1) / kSegment * kSegment);
    c10::reportMemoryUsageToProfiler(data, bytes, static_cast<size_t>(allocated_),
                                     static_cast<size_t>(reserved_), c10::Device(c10::kCUDA, 0));
  }
  /// This thread's.
  static ReportedAsCuda*& current() {
    static thread_local ReportedAsCuda* current = nullptr;
    return current;
  }

  std::unordered_map<void*, int64_t> blocks_;
  int64_t allocated_ = 0, reserved_ = 0;
};

class RoundedBlocks : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(RoundedBlocks, StateIsTheFormulaAndTheRounding) {
  TESSERA_ON_ONE_BACKEND();
  Case c;
  c.world = 3;
  c.config.zero.stage = std::get<0>(GetParam());
  c.config.zero.param_persistence_threshold = 0;
  c.config.zero.unit_numel = 20'000;
  c.config.bf16 = std::get<1>(GetParam());
  c.optimizer = "AdamW";
  torch::nn::Sequential model;
  for (int i = 0; i < 20; ++i) model->push_back(torch::nn::Linear(65, 65));
  const ReportedAsCuda reported;
  MemoryMeter meter(at::kCUDA);
  const auto engine =
      initialize(model, engine_config(c),
                 std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{.rank = 0, .size = c.world}));
  engine->backward(engine->forward(at::ones({2, 65})).to(at::kFloat).square().mean());
  engine->step();
  EXPECT_EQ(meter.peak_reserved(), reported.reserved()) << "it only grows";
  EXPECT_GE(meter.peak_reserved(), meter.peak().total());

  const zero::StateBytes state = engine->measured_bytes();
  EXPECT_EQ(state, engine->formula_bytes());
  const int64_t num_units = engine->sharded_model().layout().num_units();
  ASSERT_GT(num_units, 1);
  const MemoryBytes held = meter.now();
  const auto check = [&](MemoryUse use, int64_t bytes, int64_t blocks_a_unit) {
    EXPECT_GE(held[use], bytes) << key_of(use);
    EXPECT_LE(held[use], bytes + blocks_a_unit * num_units * (kBlock - 1)) << key_of(use);
  };
  check(MemoryUse::kParameters, state.parameters, 1);
  check(MemoryUse::kGradients, state.gradients, 1);
  check(MemoryUse::kMaster, state.master, 1);
  check(MemoryUse::kOptimizer, state.optimizer, 2);
}

INSTANTIATE_TEST_SUITE_P(Stages, RoundedBlocks, ::testing::Combine(::testing::Range(0, 4), ::testing::Bool()),
                         [](const auto& info) {
                           return str("Stage", std::get<0>(info.param),
                                      std::get<1>(info.param) ? "Bf16" : "Fp32");
                         });

}  // namespace
}  // namespace tessera::testing

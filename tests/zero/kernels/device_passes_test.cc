// What the threads of the CUDA kernels do, one after another on the CPU: every element once, the bits of the
// CPU's loops wherever a segment starts, and sums whose order is that of the elements' number alone.
#include "zero/kernels/device_passes.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "zero/kernels/make_rule.h"

namespace tessera::kernels {
namespace {

using device::Groups;
using device::kGroup;
using device::kGroupsABlock;
using device::kThreads;
using device::Pair;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
/// Around a group, and around a block's chunk.
constexpr int64_t kNumels[] = {0,    1, 3, 4, 5, 17, kGroup * kGroupsABlock - 1, kGroup * kGroupsABlock + 3,
                               9'001};

/// (numel) elements of a dtype that begin `offset` elements after an address that is aligned for all.
class Elements {
 public:
  Elements(int64_t numel, DType dtype, int64_t offset, uint32_t seed, bool positive = false)
      : bytes_(static_cast<size_t>((numel + offset) * size_bytes(dtype) + 64)),
        begin_(static_cast<size_t>((64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64 +
                                   static_cast<uintptr_t>(offset * size_bytes(dtype)))),
        numel_(numel),
        dtype_(dtype) {
    std::mt19937 bits(seed);
    for (int64_t i = 0; i < numel; ++i) {
      const float value = static_cast<float>(bits() >> 8) * 0x1p-22f + 0x1p-3f;
      store_element(data(), dtype, i, !positive && bits() % 2 == 0 ? -value : value);
    }
  }
  void* data() { return bytes_.data() + begin_; }
  float* floats() { return static_cast<float*>(data()); }
  void set(int64_t i, float value) { store_element(data(), dtype_, i, value); }
  ConstSpan span() { return {data(), dtype_, numel_}; }
  /// All of it, also what lies before and behind the elements.
  bool operator==(const Elements& other) const {
    return std::memcmp(bytes_.data() + begin_, other.bytes_.data() + other.begin_,
                       static_cast<size_t>(numel_ * size_bytes(dtype_))) == 0;
  }
  bool untouched_outside() const {
    const auto end = begin_ + static_cast<size_t>(numel_ * size_bytes(dtype_));
    for (size_t i = 0; i < bytes_.size(); ++i)
      if ((i < begin_ || i >= end) && bytes_[i] != std::byte{0}) return false;
    return true;
  }

 private:
  std::vector<std::byte> bytes_;
  size_t begin_;
  int64_t numel_;
  DType dtype_;
};

/// The arrays of a segment. `offsets` in elements, from places that are aligned: of the fp32 arrays, the
/// gradient, the parameter.
struct Arrays {
  Arrays(int64_t numel, DType dtype, int64_t offset, int64_t grad_offset, int64_t param_offset)
      : master(numel, DType::kFloat32, offset, 1),
        state0(numel, DType::kFloat32, offset, 2),
        state1(numel, DType::kFloat32, offset, 3, /*positive=*/true),
        grad(numel, dtype, grad_offset, 4),
        param(numel, dtype, param_offset, 5),
        args{.numel = numel,
             .master = master.floats(),
             .state0 = state0.floats(),
             .state1 = state1.floats(),
             .grad = grad.data(),
             .param = param.data(),
             .grad_dtype = dtype,
             .param_dtype = dtype,
             .grad_scale = 0.37f} {}
  Elements master, state0, state1, grad, param;
  UpdateArgs args;

  void expect_equal(const Arrays& expected) const {
    EXPECT_TRUE(master == expected.master);
    EXPECT_TRUE(state0 == expected.state0);
    EXPECT_TRUE(state1 == expected.state1);
    EXPECT_TRUE(param == expected.param);
    for (const Elements* each : {&master, &state0, &state1, &param}) EXPECT_TRUE(each->untouched_outside());
  }
};

/// Calls thread(block, thread) as a launch does.
template <class Thread>
void for_threads(int num_blocks, const Thread& thread) {
  for (int block = 0; block < num_blocks; ++block)
    for (int t = 0; t < kThreads; ++t) thread(block, t);
}

/// As a block and a second kernel add.
double total(std::vector<double> values) {
  for (size_t half = values.size() / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) values[i] += values[i + half];
  return values[0];
}

struct Sums {
  double first = 0, second = 0;
  bool operator==(const Sums&) const = default;
};

template <class ThreadSum>
Sums sums_of(int num_blocks, const ThreadSum& thread_sum) {
  Sums sums;
  for (int block = 0; block < num_blocks; ++block) {
    std::vector<double> first(kThreads), second(kThreads);
    for (int t = 0; t < kThreads; ++t) {
      const Pair pair = thread_sum(block, t);
      first[static_cast<size_t>(t)] = pair.first;
      second[static_cast<size_t>(t)] = pair.second;
    }
    sums.first += total(first);
    sums.second += total(second);
  }
  return sums;
}

/// Calls visit(numel, dtype, offset, grad_offset, param_offset) for segments that align together, with a
/// shift, or not at all.
template <class Visit>
void for_segments(const Visit& visit) {
  for (const DType dtype : kDtypes)
    for (const int64_t numel : kNumels) {
      for (const int64_t offset : {0, 1, 2, 3, 4, 7}) visit(numel, dtype, offset, offset, offset);
      visit(numel, dtype, 0, 1, 0);
      visit(numel, dtype, 3, 3, 2);
      visit(numel, dtype, 1, 5, 9);  // the same shift
    }
}

template <class RuleType>
void expect_updates_equal(const RuleType& rule) {
  for_segments([&](int64_t numel, DType dtype, int64_t offset, int64_t grad_offset, int64_t param_offset) {
    Arrays found(numel, dtype, offset, grad_offset, param_offset),
        expected(numel, dtype, offset, grad_offset, param_offset);
    const Groups groups = device::groups_of(found.args);
    const device::UpdateEntry<RuleType> entry{rule, found.args, groups};
    for_threads(groups.num_blocks(),
                [&](int block, int thread) { device::update_chunk(entry, block, thread); });
    cpu::update(Rule(rule), expected.args);
    found.expect_equal(expected);
  });
}

TEST(DevicePasses, UpdatesEqualTheCpusWhereverASegmentStarts) {
  const Hyper hyper{.lr = 0.01, .weight_decay = 0.1, .momentum = 0.9};
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kSGD, OptimizerKind::kAdagrad, OptimizerKind::kLion})
    std::visit([](const auto& rule) { expect_updates_equal(rule); }, make_rule(kind, hyper, 3));
  std::visit([](const auto& rule) { expect_updates_equal(rule); }, make_rule(OptimizerKind::kSGD, {}, 3));
}

TEST(DevicePasses, LambEqualsTheCpus) {
  const LambRule rule = make_lamb_rule({.lr = 0.01, .weight_decay = 0.1}, 3);
  for_segments([&](int64_t numel, DType dtype, int64_t offset, int64_t grad_offset, int64_t param_offset) {
    Arrays found(numel, dtype, offset, grad_offset, param_offset),
        expected(numel, dtype, offset, grad_offset, param_offset), moved(numel, dtype, 0, 0, 0);
    const auto norms = [&](const UpdateArgs& args) {
      const device::LambEntry entry{rule, 0, args, device::unshifted_groups_of(args)};
      return sums_of(entry.groups.num_blocks(), [&](int block, int thread) {
        return device::lamb_norms_of_chunk(entry, block, thread);
      });
    };
    const Sums sums = norms(found.args);
    const LambPart part = cpu::lamb_norms(rule, expected.args);
    EXPECT_NEAR(sums.first, part.weight_sq, 1e-12 * part.weight_sq);
    EXPECT_NEAR(sums.second, part.update_sq, 1e-12 * part.update_sq);
    EXPECT_EQ(sums, norms(moved.args)) << "to the bit, from an aligned place";
    const device::LambEntry entry{rule, 0.02f, found.args, device::groups_of(found.args)};
    for_threads(entry.groups.num_blocks(),
                [&](int block, int thread) { device::lamb_apply_chunk(entry, block, thread); });
    cpu::lamb_apply(rule, 0.02f, expected.args);
    found.expect_equal(expected);
  });
}

Sums norm_of(const ConstSpan& span) {
  const device::NormEntry entry{span, device::groups_of(span)};
  return sums_of(entry.groups.num_blocks(),
                 [&](int block, int thread) { return device::norm_of_chunk(entry, block, thread); });
}

TEST(DevicePasses, NormsDependOnTheElementsAlone) {
  for (const DType dtype : kDtypes)
    for (const int64_t numel : kNumels) {
      Elements aligned(numel, dtype, 0, 7);
      const NormPart expected = cpu::squared_norm(aligned.span());
      const Sums found = norm_of(aligned.span());
      EXPECT_NEAR(found.first, expected.sum_of_squares, 1e-12 * expected.sum_of_squares);
      EXPECT_EQ(found.second, 0);
      for (const int64_t offset : {1, 2, 3, 7}) {
        Elements moved(numel, dtype, offset, 7);
        EXPECT_EQ(norm_of(moved.span()), found) << numel << " from " << offset;
      }
      if (numel < 3) continue;
      aligned.set(numel - 1, std::numeric_limits<float>::quiet_NaN());
      aligned.set(1, -std::numeric_limits<float>::infinity());
      const NormPart damaged = cpu::squared_norm(aligned.span());
      EXPECT_NEAR(norm_of(aligned.span()).first, damaged.sum_of_squares, 1e-12 * damaged.sum_of_squares);
      EXPECT_EQ(norm_of(aligned.span()).second, 2);
    }
}

TEST(DevicePasses, GroupsCoverEveryElementOnceAndAlignedOnesAreAligned) {
  for (const int64_t numel : kNumels)
    for (int32_t shift = 0; shift < kGroup; ++shift)
      for (const bool aligned : {true, false}) {
        const Groups groups{.numel = numel, .shift = shift, .aligned = aligned};
        std::vector<int> visits(static_cast<size_t>(numel));
        int64_t num_whole = 0;
        for_threads(groups.num_blocks(), [&](int block, int thread) {
          device::for_groups(groups, block, thread, [&](const device::GroupAt& at) {
            num_whole += at.whole;
            if (at.whole) {
              EXPECT_EQ((at.begin + shift) % kGroup, 0);
            }
            for (int i = 0; i < kGroup; ++i)
              if (at.has(i)) ++visits.at(static_cast<size_t>(at.begin + i));
          });
        });
        for (const int count : visits) ASSERT_EQ(count, 1);
        EXPECT_EQ(num_whole > 0, aligned && numel >= kGroup + (kGroup - shift) % kGroup);
      }
}

TEST(DevicePasses, OneShiftAlignsAllArraysOrNone) {
  for (const DType dtype : kDtypes) {
    const auto groups = [&](int64_t offset, int64_t grad_offset, int64_t param_offset) {
      Arrays arrays(100, dtype, offset, grad_offset, param_offset);
      return device::groups_of(arrays.args);
    };
    EXPECT_TRUE(groups(0, 0, 0).aligned);
    EXPECT_EQ(groups(0, 4, 8).shift, 0);
    EXPECT_TRUE(groups(3, 3, 7).aligned);
    EXPECT_EQ(groups(3, 3, 7).shift, 3);
    for (const Groups& none : {groups(0, 1, 0), groups(1, 1, 0), groups(1, 0, 0)}) {
      EXPECT_FALSE(none.aligned);
      EXPECT_EQ(none.shift, 0);
    }
    Arrays arrays(100, dtype, 2, 2, 1);
    EXPECT_FALSE(device::groups_of(arrays.args).aligned);
    arrays.args.param = nullptr;
    EXPECT_TRUE(device::groups_of(arrays.args).aligned) << "the master is the parameter";
    EXPECT_FALSE(device::unshifted_groups_of(arrays.args).aligned) << "sums are not shifted";
    EXPECT_EQ(device::unshifted_groups_of(arrays.args).shift, 0);
  }
}

TEST(DevicePasses, ATableFindsTheSegmentOfABlock) {
  device::Table<int, 4> table;
  for (const auto& [entry, num_blocks] : {std::pair{10, 2}, {11, 1}, {12, 0}, {13, 3}}) {
    EXPECT_FALSE(table.full());
    table.add(entry, num_blocks);
  }
  EXPECT_TRUE(table.full());
  ASSERT_EQ(table.num_blocks(), 6);
  std::vector<int> found;
  for (int block = 0; block < table.num_blocks(); ++block)
    found.push_back(table.entries[table.entry_of(block)]);
  EXPECT_EQ(found, (std::vector<int>{10, 10, 11, 13, 13, 13}));
}

}  // namespace
}  // namespace tessera::kernels

// What a thread of a CUDA kernel does, without CUDA: cuda.cu has the launches around it, and
// device_passes_test.cc calls it thread after thread on the CPU.
//
// [Note: segments and groups] A launch goes over a table of segments, which the kernel gets by value. Each
// block has a chunk of one segment, each thread groups of kGroup neighbouring elements of it, so that a warp
// reads and writes 16 bytes a thread (8 of 16-bit types) without gaps. Segments may start at any element.
// Where one shift aligns all arrays of a segment, groups begin at the aligned places: the first and the last
// group may be incomplete, and are read element by element. Where none does, all are. An elementwise pass
// gives the same bits either way. Sums are never shifted: which thread adds which elements, in which order,
// depends on the number of elements alone.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/float_bits.h"
#include "zero/kernels/passes.h"

namespace tessera::kernels::device {

inline constexpr int kThreads = 256;  // a block
inline constexpr int kGroup = 4;      // elements
inline constexpr int kGroupsAThread = 4;
inline constexpr int kGroupsABlock = kThreads * kGroupsAThread;
/// What a launch of today's and of older drivers takes as arguments.
inline constexpr int kMaxParameterBytes = 4096;

struct Pair {
  double first = 0;
  double second = 0;
};

TESSERA_HD void operator+=(Pair& a, const Pair& b) {
  a.first += b.first;
  a.second += b.second;
}

/// How a segment is cut into groups: the first one begins `shift` elements before it.
struct Groups {
  int64_t numel = 0;
  int32_t shift = 0;     ///< 0 … kGroup - 1
  bool aligned = false;  ///< complete groups may be read and written at once

  TESSERA_HD int64_t count() const { return (numel + shift + kGroup - 1) / kGroup; }
  TESSERA_HD int64_t begin(int64_t group) const { return group * kGroup - shift; }
  TESSERA_HD bool whole(int64_t begin) const { return aligned && begin >= 0 && begin + kGroup <= numel; }
  int32_t num_blocks() const { return static_cast<int32_t>((count() + kGroupsABlock - 1) / kGroupsABlock); }
};

/// Elements between the last place where a group may begin, and `data`.
inline int32_t misaligned_by(const void* data, DType dtype) {
  return static_cast<int32_t>(reinterpret_cast<uintptr_t>(data) / static_cast<uintptr_t>(size_bytes(dtype)) %
                              kGroup);
}

inline Groups groups_of(const UpdateArgs& args) {
  Groups groups{.numel = args.numel, .shift = misaligned_by(args.master, DType::kFloat32), .aligned = true};
  const auto follows = [&](const void* data, DType dtype) {
    groups.aligned &= data == nullptr || misaligned_by(data, dtype) == groups.shift;
  };
  follows(args.state0, DType::kFloat32);
  follows(args.state1, DType::kFloat32);
  follows(args.state2, DType::kFloat32);
  follows(args.grad, args.grad_dtype);
  follows(args.param, args.param_dtype);
  if (!groups.aligned) groups.shift = 0;
  return groups;
}

/// Returns the groups of a pass that sums.
inline Groups groups_of(const ConstSpan& span) {
  return {.numel = span.numel, .shift = 0, .aligned = misaligned_by(span.data, span.dtype) == 0};
}
/// Returns the groups of an update that sums too.
inline Groups unshifted_groups_of(const UpdateArgs& args) {
  Groups groups = groups_of(args);
  groups.aligned &= groups.shift == 0;
  groups.shift = 0;
  return groups;
}

/// fp64 elements that a pass which sums needs for a segment: two a block.
inline int64_t scratch_numel(int64_t numel) { return 2 * int64_t{Groups{.numel = numel}.num_blocks()}; }

/// The segments of a launch.
template <class Entry, int kMax>
struct Table {
  static constexpr int kCapacity = kMax;
  int32_t num_entries = 0;
  int32_t first_block[kMax + 1] = {};  ///< entry e has blocks first_block[e] … first_block[e + 1] - 1
  Entry entries[kMax];

  bool full() const { return num_entries == kMax; }
  int32_t num_blocks() const { return first_block[num_entries]; }
  void add(const Entry& entry, int32_t num_blocks) {
    entries[num_entries] = entry;
    first_block[num_entries + 1] = first_block[num_entries] + num_blocks;
    ++num_entries;
  }
  TESSERA_HD int entry_of(int32_t block) const {
    int entry = 0;
    while (first_block[entry + 1] <= block) ++entry;
    return entry;
  }
};

// -------------------------------------------------------------------------------------------- groups

struct alignas(16) FourFloats {
  float values[kGroup];
};
struct alignas(8) FourHalves {
  uint16_t values[kGroup];
};

/// One instruction each. A plain assignment is not: the compiler merges it with the stores of incomplete
/// groups, element by element. __stwb is the ordinary store.
TESSERA_HD void write(FourFloats* to, const FourFloats& group) {
#ifdef __CUDA_ARCH__
  __stwb(reinterpret_cast<float4*>(to),
         make_float4(group.values[0], group.values[1], group.values[2], group.values[3]));
#else
  *to = group;
#endif
}
TESSERA_HD void write(FourHalves* to, const FourHalves& group) {
#ifdef __CUDA_ARCH__
  __stwb(reinterpret_cast<ushort4*>(to),
         make_ushort4(group.values[0], group.values[1], group.values[2], group.values[3]));
#else
  *to = group;
#endif
}

/// Elements begin … begin + 3.
TESSERA_HD FourFloats load_group(const void* data, DType dtype, int64_t begin) {
  if (dtype == DType::kFloat32)
    return *reinterpret_cast<const FourFloats*>(static_cast<const float*>(data) + begin);
  const FourHalves halves = *reinterpret_cast<const FourHalves*>(static_cast<const uint16_t*>(data) + begin);
  FourFloats group;
  for (int i = 0; i < kGroup; ++i)
    group.values[i] =
        dtype == DType::kBFloat16 ? float_of_bf16(halves.values[i]) : float_of_fp16(halves.values[i]);
  return group;
}

TESSERA_HD void store_group(void* data, DType dtype, int64_t begin, const FourFloats& group) {
  if (dtype == DType::kFloat32)
    return write(reinterpret_cast<FourFloats*>(static_cast<float*>(data) + begin), group);
  FourHalves halves;
  for (int i = 0; i < kGroup; ++i)
    halves.values[i] =
        dtype == DType::kBFloat16 ? bf16_of_float(group.values[i]) : fp16_of_float(group.values[i]);
  write(reinterpret_cast<FourHalves*>(static_cast<uint16_t*>(data) + begin), halves);
}

/// Part of a group: its elements from `first` to `last` - 1, of which element 0 is at `begin`.
struct GroupAt {
  int64_t begin = 0;
  int first = 0, last = kGroup;
  bool whole = false;

  TESSERA_HD GroupAt(const Groups& groups, int64_t group) : begin(groups.begin(group)) {
    whole = groups.whole(begin);
    if (whole) return;
    first = begin < 0 ? static_cast<int>(-begin) : 0;
    last = groups.numel - begin < kGroup ? static_cast<int>(groups.numel - begin) : kGroup;
  }
  /// Loops over a group ask this, instead of beginning at `first`, so that the compiler unrolls them and
  /// keeps groups in registers.
  TESSERA_HD bool has(int element) const { return element >= first && element < last; }
  /// Zeros beside its elements.
  TESSERA_HD FourFloats load(const void* data, DType dtype) const {
    if (whole) return load_group(data, dtype, begin);
    FourFloats group = {};
    for (int i = 0; i < kGroup; ++i)
      if (has(i)) group.values[i] = load_element(data, dtype, begin + i);
    return group;
  }
  TESSERA_HD void store(void* data, DType dtype, const FourFloats& group) const {
    if (whole) return store_group(data, dtype, begin, group);
    for (int i = 0; i < kGroup; ++i)
      if (has(i)) store_element(data, dtype, begin + i, group.values[i]);
  }
};

/// The number of the i-th group of `thread` in a chunk; maybe behind the last one.
TESSERA_HD int64_t group_of(int64_t chunk, int thread, int i) {
  return chunk * kGroupsABlock + static_cast<int64_t>(i) * kThreads + thread;
}

/// Calls visit(GroupAt) for the groups of `thread` in a chunk, in their order.
template <class Visit>
TESSERA_HD void for_groups(const Groups& groups, int64_t chunk, int thread, const Visit& visit) {
  for (int i = 0; i < kGroupsAThread; ++i) {
    const int64_t group = group_of(chunk, thread, i);
    if (group < groups.count()) visit(GroupAt(groups, group));
  }
}

// -------------------------------------------------------------------------------------------- passes

template <class RuleType>
struct UpdateEntry {
  RuleType rule;
  UpdateArgs args;
  Groups groups;
};

/// What a rule needs of a group: weights, gradient times its scale, states.
TESSERA_HD FourFloats scaled_grad(const UpdateArgs& args, const GroupAt& at) {
  FourFloats grad = at.load(args.grad, args.grad_dtype);
  for (float& value : grad.values) value = value * args.grad_scale;
  return grad;
}

TESSERA_HD void store_weights(const UpdateArgs& args, const GroupAt& at, const FourFloats& weights) {
  at.store(args.master, DType::kFloat32, weights);
  if (args.param != nullptr) at.store(args.param, args.param_dtype, weights);
}

template <class RuleType>
TESSERA_HD void update_chunk(const UpdateEntry<RuleType>& entry, int64_t chunk, int thread) {
  const UpdateArgs& args = entry.args;
  for_groups(entry.groups, chunk, thread, [&](const GroupAt& at) {
    const FourFloats grad = scaled_grad(args, at);
    FourFloats weights = at.load(args.master, DType::kFloat32), first = {}, second = {}, third = {};
    if constexpr (RuleType::kNumStates > 0) first = at.load(args.state0, DType::kFloat32);
    if constexpr (RuleType::kNumStates > 1) second = at.load(args.state1, DType::kFloat32);
    if constexpr (RuleType::kNumStates > 2) third = at.load(args.state2, DType::kFloat32);
    for (int i = 0; i < kGroup; ++i)
      weights.values[i] = entry.rule.step(weights.values[i], grad.values[i], first.values[i],
                                          second.values[i], third.values[i]);
    if constexpr (RuleType::kNumStates > 0) at.store(args.state0, DType::kFloat32, first);
    if constexpr (RuleType::kNumStates > 1) at.store(args.state1, DType::kFloat32, second);
    if constexpr (RuleType::kNumStates > 2) at.store(args.state2, DType::kFloat32, third);
    store_weights(args, at, weights);
  });
}

TESSERA_HD double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }

struct NormEntry {
  ConstSpan span;
  Groups groups;
};

/// The thread's part: sum of squares of the finite elements, number of the others.
TESSERA_HD Pair norm_of_chunk(const NormEntry& entry, int64_t chunk, int thread) {
  // All are on their way before the first is waited for.
  FourFloats loaded[kGroupsAThread];
  for (int i = 0; i < kGroupsAThread; ++i) {
    const int64_t group = group_of(chunk, thread, i);
    loaded[i] = group < entry.groups.count()
                    ? GroupAt(entry.groups, group).load(entry.span.data, entry.span.dtype)
                    : FourFloats{};
  }
  Pair sum;
  for (const FourFloats& group : loaded)
    for (const float x : group.values) {  // a zero adds nothing
      const bool finite = is_finite(x);
      sum.first += finite ? square(x) : 0.0;
      sum.second += finite ? 0.0 : 1.0;
    }
  return sum;
}

struct LambEntry {
  LambRule rule;
  float step_size;  ///< of the second pass
  UpdateArgs args;
  Groups groups;
};

/// Moments; the thread's part of the sums of squares of the weights and of the update.
TESSERA_HD Pair lamb_norms_of_chunk(const LambEntry& entry, int64_t chunk, int thread) {
  Pair sum;
  const UpdateArgs& args = entry.args;
  for_groups(entry.groups, chunk, thread, [&](const GroupAt& at) {
    const FourFloats grad = scaled_grad(args, at), weights = at.load(args.master, DType::kFloat32);
    FourFloats first = at.load(args.state0, DType::kFloat32), second = at.load(args.state1, DType::kFloat32);
    for (int i = 0; i < kGroup; ++i) entry.rule.advance(grad.values[i], first.values[i], second.values[i]);
    at.store(args.state0, DType::kFloat32, first);
    at.store(args.state1, DType::kFloat32, second);
    for (int i = 0; i < kGroup; ++i) {
      if (!at.has(i)) continue;
      sum.first += square(weights.values[i]);
      sum.second += square(entry.rule.direction(weights.values[i], first.values[i], second.values[i]));
    }
  });
  return sum;
}

TESSERA_HD void lamb_apply_chunk(const LambEntry& entry, int64_t chunk, int thread) {
  const UpdateArgs& args = entry.args;
  for_groups(entry.groups, chunk, thread, [&](const GroupAt& at) {
    FourFloats weights = at.load(args.master, DType::kFloat32);
    const FourFloats first = at.load(args.state0, DType::kFloat32),
                     second = at.load(args.state1, DType::kFloat32);
    for (int i = 0; i < kGroup; ++i)
      weights.values[i] =
          weights.values[i] -
          entry.step_size * entry.rule.direction(weights.values[i], first.values[i], second.values[i]);
    store_weights(args, at, weights);
  });
}

// The tables of a launch: as many segments as fit into its arguments.
template <class RuleType>
using UpdateTable = Table<UpdateEntry<RuleType>, 30>;
using NormTable = Table<NormEntry, 80>;
using LambTable = Table<LambEntry, 28>;
/// Where the sums of a table's entries go.
struct SumTable {
  int32_t first_block[NormTable::kCapacity + 1];
  double* results[NormTable::kCapacity];  ///< two each
};

static_assert(sizeof(UpdateTable<AdamRule>) <= kMaxParameterBytes);
static_assert(sizeof(NormTable) + sizeof(Pair*) <= kMaxParameterBytes);
static_assert(sizeof(LambTable) + sizeof(Pair*) <= kMaxParameterBytes);
static_assert(sizeof(SumTable) + sizeof(Pair*) <= kMaxParameterBytes);
static_assert(LambTable::kCapacity <= NormTable::kCapacity);

}  // namespace tessera::kernels::device

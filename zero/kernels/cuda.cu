// The CUDA kernels. Elements: the same rules as the CPU's; compiled with --fmad=false, so that an element's
// bits are the CPU's. What a thread does is in device_passes.h, but for the kernel of 8-bit moments. Sums:
// every thread adds its elements in order in fp64, a block adds its threads in a fixed tree, a second kernel
// adds a segment's blocks the same way. Which elements a thread adds depends on their number alone, so the
// bits depend on nothing else (no atomics, not the device, not what else is in the launch).
#include <cuda_runtime.h>

#include "zero/kernels/cuda_abi.h"
#include "zero/kernels/device_passes.h"

namespace tessera::kernels {
namespace {

using device::kThreads;
using device::Pair;

const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// ------------------------------------------------------------------------------------------- kernels
// `table` stays in the constant memory of the arguments: __grid_constant__ keeps the compiler from copying
// it.

template <class RuleType>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ device::UpdateTable<RuleType> table) {
  const int block = static_cast<int>(blockIdx.x), entry = table.entry_of(block);
  device::update_chunk(table.entries[entry], block - table.first_block[entry], static_cast<int>(threadIdx.x));
}

__global__ void __launch_bounds__(kThreads)
    lamb_apply_kernel(const __grid_constant__ device::LambTable table) {
  const int block = static_cast<int>(blockIdx.x), entry = table.entry_of(block);
  device::lamb_apply_chunk(table.entries[entry], block - table.first_block[entry],
                           static_cast<int>(threadIdx.x));
}

/// Adds the block's pairs in a fixed tree; every thread of the block calls it, *out is written by one.
__device__ void reduce_block(Pair mine, Pair* out) {
  __shared__ double first[kThreads], second[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  first[thread] = mine.first;
  second[thread] = mine.second;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) {
      first[thread] += first[thread + half];
      second[thread] += second[thread + half];
    }
    __syncthreads();
  }
  if (thread == 0) {
    out->first = first[0];
    out->second = second[0];
  }
}

__global__ void __launch_bounds__(kThreads)
    norm_kernel(const __grid_constant__ device::NormTable table, Pair* partials) {
  const int block = static_cast<int>(blockIdx.x), entry = table.entry_of(block);
  reduce_block(device::norm_of_chunk(table.entries[entry], block - table.first_block[entry],
                                     static_cast<int>(threadIdx.x)),
               partials + block);
}

__global__ void __launch_bounds__(kThreads)
    lamb_norms_kernel(const __grid_constant__ device::LambTable table, Pair* partials) {
  const int block = static_cast<int>(blockIdx.x), entry = table.entry_of(block);
  reduce_block(device::lamb_norms_of_chunk(table.entries[entry], block - table.first_block[entry],
                                           static_cast<int>(threadIdx.x)),
               partials + block);
}

/// A block for each entry.
__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(const __grid_constant__ device::SumTable table, const Pair* partials) {
  const int entry = static_cast<int>(blockIdx.x);
  Pair mine;
  for (int i = table.first_block[entry] + static_cast<int>(threadIdx.x); i < table.first_block[entry + 1];
       i += kThreads)
    mine += partials[i];
  reduce_block(mine, reinterpret_cast<Pair*>(table.results[entry]));
}

/// What adam_8bit_kernel gets, in the constant memory of its arguments.
struct Adam8bit {
  Adam8bitArgs parameter;
  AdamRule rule;
  Codebook first, second;
};

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;                // of a block of threads
constexpr int kElements8bit = kBlockNumel8bit / kWarp;  // a thread has of a block of elements: each 32nd

__device__ float largest_of_warp(const float (&values)[kElements8bit]) {
  float most = 0;
  for (const float value : values) most = fmaxf(most, fabsf(value));
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, distance));
  return most;
}

/// Writes the codes and the largest magnitude of a block's moments. `codes`: the first of this thread's, of
/// which it has those before `left`.
__device__ void write_codes(const float (&moment)[kElements8bit], const Codebook& book, int64_t left,
                            uint8_t* codes, float* absmax, bool is_first_lane) {
  const float most = largest_of_warp(moment), scale = 1 / most;
  if (is_first_lane) *absmax = most;
  for (int j = 0; j < kElements8bit; ++j)
    if (j * kWarp < left)
      codes[j * kWarp] =
          most < kLeastMagnitude8bit ? static_cast<uint8_t>(book.zero) : code_of(moment[j], scale, book);
}

/// A warp has a block of elements, and then the one that is the grid's number of warps further on.
__global__ void __launch_bounds__(kThreads) adam_8bit_kernel(const __grid_constant__ Adam8bit args) {
  // Threads look different codes up at once, which constant memory is slow at.
  __shared__ Codebook books[2];
  const auto* const words = reinterpret_cast<const uint32_t*>(&args.first);
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(books) / sizeof(uint32_t));
       i += kThreads)
    reinterpret_cast<uint32_t*>(books)[i] = words[i];
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const Adam8bitArgs& p = args.parameter;
  const int64_t num_blocks = num_blocks_8bit(p.numel);
  for (int64_t block = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; block < num_blocks;
       block += int64_t{gridDim.x} * kWarps) {
    const int64_t begin = block * kBlockNumel8bit + lane, left = p.numel - begin;
    const float absmax1 = p.absmax1[block], absmax2 = p.absmax2[block];
    // All are read before the first is written, so that a thread waits for memory once.
    float m[kElements8bit], v[kElements8bit], w[kElements8bit], g[kElements8bit];
    for (int j = 0; j < kElements8bit; ++j) {
      const bool is_there = j * kWarp < left;
      const int64_t i = begin + j * kWarp;
      w[j] = is_there ? p.weights[i] : 0;
      g[j] = is_there ? p.gradient[i] : 0;
      m[j] = is_there ? books[0].values[p.codes1[i]] * absmax1 : 0;
      v[j] = is_there ? books[1].values[p.codes2[i]] * absmax2 : 0;
    }
    for (int j = 0; j < kElements8bit; ++j) {
      float none = 0;
      const float updated = args.rule.step(w[j], g[j], m[j], v[j], none);
      v[j] = v[j] > kMostMagnitude8bit ? kMostMagnitude8bit : v[j];
      if (j * kWarp < left) p.weights[begin + j * kWarp] = updated;
    }
    write_codes(m, books[0], left, p.codes1 + begin, p.absmax1 + block, lane == 0);
    write_codes(v, books[1], left, p.codes2 + begin, p.absmax2 + block, lane == 0);
  }
}

// ------------------------------------------------------------------------------------------ launches

template <class Table, class Launch>
const char* launch_if_any(const Table& table, const Launch& launch) {
  if (table.num_blocks() == 0) return nullptr;
  launch(table);
  return launch_error();
}

/// One launch over the segments from `begin` on that have this rule, as many as fit. Returns CUDA's error
/// text or null.
template <class RuleType>
const char* update_from(int64_t& begin, const Rule* rules, const UpdateArgs* args, int64_t count,
                        cudaStream_t stream) {
  device::UpdateTable<RuleType> table;
  for (; begin < count && !table.full() && std::holds_alternative<RuleType>(rules[begin]); ++begin) {
    const device::Groups groups = device::groups_of(args[begin]);
    table.add({std::get<RuleType>(rules[begin]), args[begin], groups}, groups.num_blocks());
  }
  return launch_if_any(table, [&](const auto& full) {
    update_kernel<RuleType><<<full.num_blocks(), kThreads, 0, stream>>>(full);
  });
}

/// Calls `add(table, i)` for i from 0 to count - 1 and `launch(table, first)` for each table that is full,
/// and for the last; `first` is the table's first i. Returns CUDA's error text or null.
template <class Table, class Add, class Launch>
const char* in_tables(int64_t count, const Add& add, const Launch& launch) {
  for (int64_t next = 0; next < count;) {
    Table table;
    const int64_t first = next;
    for (; next < count && !table.full(); ++next) add(table, next);
    if (const char* error = launch(table, first)) return error;
  }
  return nullptr;
}

/// Launches `kernel`, which leaves a pair a block, and adds each entry's.
template <class Table, class Launch>
const char* sum_pairs(const Table& table, double* const* results, double*& scratch, cudaStream_t stream,
                      const Launch& kernel) {
  auto* partials = reinterpret_cast<Pair*>(scratch);
  scratch += 2 * table.num_blocks();
  if (const char* error = launch_if_any(table, [&](const Table& full) { kernel(full, partials); }))
    return error;
  device::SumTable sums = {};
  for (int entry = 0; entry < table.num_entries; ++entry) {
    sums.first_block[entry + 1] = table.first_block[entry + 1];
    sums.results[entry] = results[entry];
  }
  add_partials_kernel<<<table.num_entries, kThreads, 0, stream>>>(sums, partials);
  return launch_error();
}

}  // namespace
}  // namespace tessera::kernels

namespace tk = tessera::kernels;

const char* tessera_cuda_update(const tk::Rule* rules, const tk::UpdateArgs* args, int64_t count,
                                void* stream) {
  const char* error = nullptr;
  for (int64_t begin = 0; begin < count && error == nullptr;)
    std::visit(
        [&](const auto& rule) {
          using RuleType = std::decay_t<decltype(rule)>;
          error = tk::update_from<RuleType>(begin, rules, args, count, static_cast<cudaStream_t>(stream));
        },
        rules[begin]);
  return error;
}

const char* tessera_cuda_squared_norms(const tk::ConstSpan* spans, double* const* results, int64_t count,
                                       double* scratch, void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  return tk::in_tables<tk::device::NormTable>(
      count,
      [&](auto& table, int64_t i) {
        const tk::device::Groups groups = tk::device::groups_of(spans[i]);
        table.add({spans[i], groups}, groups.num_blocks());
      },
      [&](const auto& table, int64_t first) {
        return tk::sum_pairs(
            table, results + first, scratch, cuda_stream, [&](const auto& full, tk::Pair* partials) {
              tk::norm_kernel<<<full.num_blocks(), tk::kThreads, 0, cuda_stream>>>(full, partials);
            });
      });
}

const char* tessera_cuda_lamb_norms(const tk::LambRule* rules, const tk::UpdateArgs* args,
                                    double* const* results, int64_t count, double* scratch, void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  return tk::in_tables<tk::device::LambTable>(
      count,
      [&](auto& table, int64_t i) {
        const tk::device::Groups groups = tk::device::unshifted_groups_of(args[i]);
        table.add({rules[i], 0, args[i], groups}, groups.num_blocks());
      },
      [&](const auto& table, int64_t first) {
        return tk::sum_pairs(
            table, results + first, scratch, cuda_stream, [&](const auto& full, tk::Pair* partials) {
              tk::lamb_norms_kernel<<<full.num_blocks(), tk::kThreads, 0, cuda_stream>>>(full, partials);
            });
      });
}

const char* tessera_cuda_lamb_apply(const tk::LambRule* rules, const float* step_sizes,
                                    const tk::UpdateArgs* args, int64_t count, void* stream) {
  return tk::in_tables<tk::device::LambTable>(
      count,
      [&](auto& table, int64_t i) {
        const tk::device::Groups groups = tk::device::groups_of(args[i]);
        table.add({rules[i], step_sizes[i], args[i], groups}, groups.num_blocks());
      },
      [&](const auto& table, int64_t) {
        return tk::launch_if_any(table, [&](const auto& full) {
          tk::lamb_apply_kernel<<<full.num_blocks(), tk::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              full);
        });
      });
}

const char* tessera_cuda_adam_8bit(const tk::Adam8bitArgs* parameter, const tk::AdamRule* rule,
                                   const tk::Codebook* first, const tk::Codebook* second, void* stream) {
  constexpr int64_t kMaxBlocks = 2048;  // of threads: more than a device runs at once
  const int64_t blocks = (tk::num_blocks_8bit(parameter->numel) + tk::kWarps - 1) / tk::kWarps;
  if (blocks == 0) return nullptr;
  tk::adam_8bit_kernel<<<static_cast<int>(blocks < kMaxBlocks ? blocks : kMaxBlocks), tk::kThreads, 0,
                         static_cast<cudaStream_t>(stream)>>>({*parameter, *rule, *first, *second});
  return tk::launch_error();
}

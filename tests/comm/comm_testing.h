// Helpers of the comm tests: buffers whose sums are known, and child processes that are ranks.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "comm/init/init.h"
#include "tests/support/errors.h"

namespace tessera::comm::testing {

// [Note: libtorch's settings]: for tests that make groups of threads without run_threads(). It is in the
// header so that every program with such a test has it.
inline const int kFlightRecorderOff = setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);

using tessera::testing::error_of;
using tessera::testing::seconds_since;

/// A backend by name, maybe with "_verified", with time limits that a test can wait for.
inline JoinOptions quick_options(const std::string& backend,
                                 std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  JoinOptions options;
  options.backend = backend.substr(0, backend.find('_'));
  options.verify = backend.ends_with("_verified");
  options.timeout = timeout;
  options.rendezvous_timeout = std::chrono::seconds(30);
  return options;
}

/// Tests that run on each backend that has ranks; GetParam() is its name.
class EachBackend : public ::testing::TestWithParam<std::string> {};

inline std::string backend_name(const ::testing::TestParamInfo<std::string>& info) { return info.param; }

/// Element i of rank r's buffer: a small integer, so that sums over 9 ranks are exact in every dtype, uint8
/// and bf16 included. The elements repeat.
inline constexpr int64_t kPeriod = 11;
inline int64_t element(int rank, int64_t i) { return (i * 3 + rank * 7) % kPeriod; }

/// (numel) of `dtype`: what element(rank, begin + i) of these ranks sums to.
inline at::Tensor summed_over(const std::vector<int>& ranks, int64_t begin, int64_t numel,
                              at::ScalarType dtype) {
  at::Tensor values = at::zeros({numel}, at::kLong);
  auto* const data = values.data_ptr<int64_t>();
  for (int64_t i = 0; i < std::min(kPeriod, numel); ++i)
    for (const int rank : ranks) data[i] += element(rank, begin + i);
  for (int64_t i = kPeriod; i < numel; ++i) data[i] = data[i - kPeriod];
  return values.to(dtype);
}

/// (numel) of `dtype`: element(rank, begin + i).
inline at::Tensor filled(int rank, int64_t begin, int64_t numel, at::ScalarType dtype) {
  return summed_over({rank}, begin, numel, dtype);
}

/// (numel) of `dtype`: what filled() sums to over all ranks.
inline at::Tensor summed(int size, int64_t begin, int64_t numel, at::ScalarType dtype) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return summed_over(ranks, begin, numel, dtype);
}

/// Numbers whose sum depends on the order of addition.
inline at::Tensor uneven(int rank, int64_t numel) {
  at::Tensor values = at::empty({numel}, at::kFloat);
  for (int64_t i = 0; i < numel; ++i)
    values.data_ptr<float>()[i] =
        static_cast<float>(element(rank, i)) * std::ldexp(0.1f, static_cast<int>((i + 5 * rank) % 17));
  return values;
}

/// (numel) of `dtype`, uninitialized: memory that the other ranks can read where the backend has such memory.
inline at::Tensor symmetric(Communicator& comm, int64_t numel, at::ScalarType dtype) {
  return comm.allocate_symmetric(numel * static_cast<int64_t>(at::elementSize(dtype)), at::kCPU, "buffer")
      .view(dtype);
}

using Variables = std::map<std::string, std::string>;

/// The path of the helper program `comm_test_rank`.
std::string rank_program();

/// Against hangs: nothing takes as long.
inline constexpr std::chrono::seconds kPatience{180};

/// A process of its own that does what `comm_test_rank` does. Killed on destruction if it still runs.
class RankProcess {
 public:
  /// The environment is the variables, PATH, LD_LIBRARY_PATH and the sanitizers' options.
  RankProcess(const std::vector<std::string>& arguments, const Variables& variables);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  /// Reads output until `text` appears. False when the process ends or kPatience passes first.
  bool await_output(const std::string& text);
  void kill(int signal);
  /// Reads until the end. Exit code, or 128 + signal. A process that still runs after kPatience is killed.
  int wait();
  /// stdout and stderr together, as far as read.
  const std::string& output() const { return output_; }

 private:
  /// False when the process ends or kPatience passes first.
  bool read_until(const std::function<bool()>& is_enough);

  int pid_ = -1;
  int pipe_ = -1;
  int status_ = -1;
  std::string output_;
};

/// torchrun's variables for one rank on one host.
Variables rank_variables(int rank, int world_size, int port);

/// A port that no process listens on at the moment.
int free_port();

using Processes = std::vector<std::unique_ptr<RankProcess>>;

/// Starts all ranks of a group with `comm_test_rank SCENARIO WHAT` and the variables `extra`.
Processes start(const std::string& scenario, int world_size, const Variables& extra = {},
                const std::string& what = "");

}  // namespace tessera::comm::testing

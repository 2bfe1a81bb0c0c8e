// C10dPending: a Pending made of c10d's works, for the Gloo and NCCL transports.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

#include "comm/transport.h"

namespace tessera::comm {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

class C10dPending final : public Pending {
 public:
  /// Done when all of `works` are. `finish` then runs once, in the wait() that returns true; may be unset.
  C10dPending(std::vector<C10dWork> works, bool wait_blocks, std::function<void()> finish = {})
      : works_(std::move(works)), wait_blocks_(wait_blocks), finish_(std::move(finish)) {}

  bool poll() override;
  bool wait(std::chrono::milliseconds limit) override;

 private:
  const std::vector<C10dWork> works_;
  const bool wait_blocks_;
  std::function<void()> finish_;
};

/// Serves a backend that only sums: returns a `finish` that takes `sum` to where and how it is wanted. Unset
/// when that is where it is already.
std::function<void()> finish_reduction(const at::Tensor& sum, const ReduceInto& into);

}  // namespace tessera::comm

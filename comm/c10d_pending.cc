#include "comm/c10d_pending.h"

#include <algorithm>
#include <utility>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// Throws the work's error, if it has failed.
void check(c10d::Work& work) {
  if (const std::exception_ptr error = work.isCompleted() ? work.exception() : nullptr)
    std::rethrow_exception(error);
}

}  // namespace

bool C10dPending::poll() {
  for (const C10dWork& work : works_) {
    if (!work->isCompleted()) return false;
    check(*work);
  }
  return true;
}

bool C10dPending::wait(milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (const C10dWork& work : works_) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    try {
      work->wait(wait_blocks_ ? std::max(left, milliseconds(1)) : kNoTimeout);
    } catch (const std::exception&) {  // it has failed, or only needs longer
      if (wait_blocks_ && !work->isCompleted()) return false;
      check(*work);
      if (!wait_blocks_) throw;
    }
    check(*work);
  }
  if (finish_) std::exchange(finish_, nullptr)();
  return true;
}

std::function<void()> finish_reduction(const at::Tensor& sum, const ReduceInto& into) {
  if (sum.data_ptr() == into.shard.data_ptr() && into.scale == 1 && !into.add) return {};
  return [sum, into] { write_result(sum, into); };
}

}  // namespace tessera::comm

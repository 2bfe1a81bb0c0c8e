#include "comm/c10d_pending.h"

#include <algorithm>
#include <utility>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// Throws the work's error, if it has one.
void check(c10d::Work& work) {
  if (!work.isCompleted()) return;
  if (const std::exception_ptr error = work.exception()) std::rethrow_exception(error);
}

/// False when the work is not completed by then. c10d reports that by an exception, like a failure.
bool wait_until(c10d::Work& work, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  try {
    work.wait(std::max(left, milliseconds(1)));  // 0 would be no limit
  } catch (const std::exception&) {
    if (!work.isCompleted()) return false;
    check(work);
  }
  return true;
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
  const auto deadline = Clock::now() + limit;
  for (const C10dWork& work : works_) {
    if (wait_blocks_) {
      if (!wait_until(*work, deadline)) return false;
    } else {
      work->wait();
      check(*work);
    }
  }
  if (finish_) std::exchange(finish_, nullptr)();
  return true;
}

std::function<void()> finish_reduction(const at::Tensor& sum, const ReduceInto& into) {
  if (sum.data_ptr() == into.shard.data_ptr() && into.scale == 1 && !into.add) return {};
  return [sum, into] { write_result(sum, into); };
}

}  // namespace tessera::comm

// HostThread: work of the host that runs beside the device, one task after another. Deferred updates run here
// where the device's memory is not the host's ([Note: deferred updates] in sharded_optimizer.h).
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace tessera::comm {

/// Has to be called by a thread that makes calls to a CUDA device, before the first: libtorch's guards put
/// back the device that was current before them, and where that was never set they make a context on device
/// 0.
void set_device_of_thread(at::Device device);

/// Runs tasks one after another on a thread that it owns. Thread-safe.
class HostThread {
 public:
  using Task = int64_t;  ///< 0: none, which has ended

  /// The thread works beside `device`.
  explicit HostThread(at::Device device = at::kCPU);
  ~HostThread() { stop(); }
  HostThread(const HostThread&) = delete;

  /// Tasks end in the order in which they were posted. Once one has thrown, those behind it are dropped.
  Task post(std::function<void()> task);
  /// Waits until the task has ended. Throws what one before it, or it, has thrown, at every call.
  void wait(Task task);
  /// The same, for at most `limit`; false: the task has not ended.
  bool wait_for(Task task, std::chrono::milliseconds limit);
  /// The same as wait() for all that were posted.
  void wait_for_all();
  /// Waits for the task that runs, and drops those behind it: who waits for one of them gets an Error.
  /// Nothing may be posted afterwards.
  void stop();

 private:
  void run();
  /// Requires the lock. Throws what `task`, or one before it, has thrown.
  void check(Task task) const;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  Task num_posted_ = 0;
  Task num_ended_ = 0;
  std::exception_ptr failure_;
  Task failed_ = 0;  // the first that has failed
  bool stops_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace tessera::comm

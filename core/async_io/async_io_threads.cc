#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "core/async_io/async_io.h"
#include "core/signals_blocked.h"

namespace tessera {
namespace {

/// Each thread runs one piece at a time, in the order of the queue.
class ThreadIo final : public AsyncIo {
 public:
  explicit ThreadIo(const AsyncIoOptions& options) : AsyncIo(options) {
    const SignalsBlocked blocked;
    for (int i = 0; i < options.num_threads; ++i)
      threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }

  ~ThreadIo() override {
    for (std::jthread& thread : threads_) thread.request_stop();  // all at once, then each is joined
  }

  void start(std::span<const IoPiece> pieces) override {
    {
      const std::scoped_lock lock(mutex_);
      queued_.insert(queued_.end(), pieces.begin(), pieces.end());
    }
    if (pieces.size() == 1)
      changed_.notify_one();
    else
      changed_.notify_all();
  }

 private:
  void work(const std::stop_token& stop) {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, stop, [&] { return !queued_.empty(); });
      if (stop.stop_requested()) return;
      IoPiece piece = queued_.front();
      queued_.pop_front();
      lock.unlock();
      run_to_end(piece);
      options_.finished(piece);
    }
  }

  std::mutex mutex_;  // for queued_
  std::condition_variable_any changed_;
  std::deque<IoPiece> queued_;
  std::vector<std::jthread> threads_;  // last: ends before what it uses
};

}  // namespace

std::unique_ptr<AsyncIo> make_thread_io(const AsyncIoOptions& options) {
  return std::make_unique<ThreadIo>(options);
}

}  // namespace tessera

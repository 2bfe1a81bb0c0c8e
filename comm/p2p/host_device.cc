#include "comm/p2p/host_device.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "comm/shm/shared_memory.h"
#include "comm/shm/shared_regions.h"
#include "core/error.h"

namespace tessera::comm::p2p {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

/// How far a stream is; its moments outlive it.
class Progress {
 public:
  void add() {
    const std::lock_guard lock(mutex_);
    ++num_given_;
  }
  void finish() {
    {
      const std::lock_guard lock(mutex_);
      ++num_finished_;
    }
    changed_.notify_all();
  }
  int64_t num_given() const {
    const std::lock_guard lock(mutex_);
    return num_given_;
  }
  bool has_finished(int64_t number) const {
    const std::lock_guard lock(mutex_);
    return num_finished_ >= number;
  }
  bool await(int64_t number, milliseconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return num_finished_ >= number; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t num_given_ = 0, num_finished_ = 0;  // steps
};

class HostMoment final : public Moment {
 public:
  HostMoment(std::shared_ptr<Progress> progress, int64_t number)
      : progress_(std::move(progress)), number_(number) {}
  bool passed() override { return progress_->has_finished(number_); }
  bool order_current(milliseconds limit) override { return progress_->await(number_, limit); }

 private:
  const std::shared_ptr<Progress> progress_;
  const int64_t number_;
};

class HostStream final : public Stream {
 public:
  explicit HostStream(microseconds lag) : lag_(lag), thread_([this] { run(); }) {}
  ~HostStream() override {
    give({});
    thread_.join();
  }

  void follow_current() override {}
  void copy(void* to, const void* from, int64_t bytes) override {
    give([=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
  }
  void reduce(const shm::Reduction& given) override {
    give([given, inputs = std::vector<const void*>(given.inputs, given.inputs + given.num_inputs)] {
      shm::Reduction reduction = given;
      reduction.inputs = inputs.data();
      shm::reduce(reduction);
    });
  }
  void write(Flag& flag, uint64_t number, bool with_upper) override {
    give([&flag, number, with_upper] {
      flag.low.store(static_cast<uint32_t>(number), std::memory_order_release);
      if (with_upper) flag.high.store(static_cast<uint32_t>(number >> 32), std::memory_order_release);
    });
  }
  void wait(const Flag& flag, uint64_t number) override {
    give([&flag, number] {
      constexpr microseconds kLongest{200};
      for (microseconds pause{5}; !flag.has_reached(number); pause = std::min(2 * pause, kLongest))
        std::this_thread::sleep_for(pause);
    });
  }
  MomentPtr now() override { return std::make_shared<HostMoment>(progress_, progress_->num_given()); }
  bool idle() override { return progress_->has_finished(progress_->num_given()); }

 private:
  using Step = std::function<void()>;

  void give(Step step) {
    progress_->add();
    {
      const std::lock_guard lock(mutex_);
      steps_.push_back(std::move(step));
    }
    changed_.notify_one();
  }

  /// Until it is given an empty step.
  void run() {
    std::minstd_rand random(static_cast<unsigned>(getpid()) + reinterpret_cast<uintptr_t>(this) % 1000);
    while (true) {
      Step step;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !steps_.empty(); });
        step = std::move(steps_.front());
        steps_.pop_front();
      }
      if (!step) return;
      if (lag_.count() > 0)
        std::this_thread::sleep_for(microseconds(random() % static_cast<uint64_t>(lag_.count() + 1)));
      step();
      progress_->finish();
    }
  }

  const microseconds lag_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Step> steps_;
  std::thread thread_;  // last: it uses the rest
};

class HostMemory final : public Memory {
 public:
  explicit HostMemory(shm::SharedMemory memory) : memory_(std::move(memory)) {}
  std::byte* data() const override { return memory_.data(); }
  int fd() const { return memory_.fd(); }
  void close_fd() { memory_.close_fd(); }

 private:
  shm::SharedMemory memory_;
};

class HostDevice final : public Device {
 public:
  explicit HostDevice(const HostDeviceOptions& options) : options_(options) {}

  at::Device place() const override { return at::kCPU; }
  int64_t half_mailbox_bytes() const override { return options_.half_mailbox_bytes; }

  std::shared_ptr<Memory> allocate(int64_t bytes) override {
    return std::make_shared<HostMemory>(shm::SharedMemory::create(shm::whole_pages(bytes)));
  }
  FileDescriptor share(Memory& memory) override {
    auto& mine = static_cast<HostMemory&>(memory);
    FileDescriptor fd(dup(mine.fd()));
    if (!fd) throw CommError("dup: too many open files (ulimit -n)");
    mine.close_fd();
    return fd;
  }
  std::shared_ptr<Memory> adopt(FileDescriptor fd, int64_t bytes) override {
    auto memory =
        std::make_shared<HostMemory>(shm::SharedMemory::adopt(std::move(fd), shm::whole_pages(bytes)));
    memory->close_fd();
    return memory;
  }
  std::shared_ptr<void> register_flags(std::byte*, int64_t) override { return nullptr; }
  std::unique_ptr<Stream> make_stream() override { return std::make_unique<HostStream>(options_.lag); }

 private:
  const HostDeviceOptions options_;
};

}  // namespace

std::shared_ptr<Device> make_host_device(const HostDeviceOptions& options) {
  return std::make_shared<HostDevice>(options);
}

}  // namespace tessera::comm::p2p

#include "comm/memory/host_thread.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/error.h"

namespace tessera::comm {

void set_device_of_thread(at::Device device) {
  if (device.is_cuda()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

HostThread::HostThread(at::Device device)
    : thread_([this, device] {
        set_device_of_thread(device);
        run();
      }) {}

void HostThread::stop() {
  std::deque<std::function<void()>> dropped;  // what they hold goes without the lock
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    dropped.swap(tasks_);
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  if (num_ended_ == num_posted_) return;
  if (!failure_) {
    failure_ = std::make_exception_ptr(Error("the task was dropped: its thread has been stopped"));
    failed_ = num_ended_ + 1;
  }
  num_ended_ = num_posted_;
  changed_.notify_all();
}

HostThread::Task HostThread::post(std::function<void()> task) {
  Task number = 0;
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    number = ++num_posted_;
  }
  changed_.notify_all();
  return number;
}

void HostThread::check(Task task) const {
  if (failure_ && task >= failed_) std::rethrow_exception(failure_);
}

void HostThread::wait(Task task) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_ended_ >= task; });
  check(task);
}

bool HostThread::wait_for(Task task, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, limit, [&] { return num_ended_ >= task; })) return false;
  check(task);
  return true;
}

void HostThread::wait_for_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_ended_ >= num_posted_; });
  check(num_posted_);
}

void HostThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stops_ || !tasks_.empty(); });
    if (stops_) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    const bool dropped = failure_ != nullptr;
    lock.unlock();
    std::exception_ptr failure;
    try {
      if (!dropped) task();
    } catch (...) {
      failure = std::current_exception();
    }
    task = nullptr;  // what it holds goes before it has ended
    lock.lock();
    ++num_ended_;
    if (failure && !failure_) {
      failure_ = std::move(failure);
      failed_ = num_ended_;
    }
    changed_.notify_all();
  }
}

}  // namespace tessera::comm

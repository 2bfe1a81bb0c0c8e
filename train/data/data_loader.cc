#include "train/data/data_loader.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/memory/memory_use.h"
#include "core/str.h"
#include "zero/kernels/parallel.h"

namespace tessera::train {
namespace {

template <class Change>
Batch transform(Batch batch, const Change& change) {
  for (at::Tensor& input : batch.inputs) input = change(input);
  if (batch.target.defined()) batch.target = change(batch.target);
  if (batch.mask.defined()) batch.mask = change(batch.mask);
  return batch;
}

}  // namespace

DataLoaderOptions data_loader_options(const TrainerConfig& trainer, at::Device device) {
  return {.num_workers = trainer.dataloader_num_workers,
          .prefetch_factor = trainer.dataloader_prefetch_factor,
          .pin_memory = trainer.dataloader_pin_memory,
          .device = device};
}

Batch to_device(Batch batch, at::Device device) {
  return transform(std::move(batch), [&](const at::Tensor& tensor) {
    return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true);
  });
}

/// A batch on its way.
struct DataLoader::Slot {
  Make make;
  Batch batch;
  std::exception_ptr error;
  bool done = false;
};

DataLoader::DataLoader(const DataLoaderOptions& options, Plan plan)
    : options_(options), plan_(std::move(plan)) {
  try {
    start(options.num_workers);
  } catch (const std::system_error& error) {
    stop();
    throw Error("trainer.dataloader_num_workers: found ", options.num_workers,
                ", but the system refuses a thread: ", error.what());
  }
}

DataLoader::~DataLoader() { stop(); }

void DataLoader::start(int64_t num_workers) {
  const std::shared_ptr<c10::ThreadLocalDebugInfo> meter = c10::ThreadLocalDebugInfo::current();
  for (int64_t i = 0; i < num_workers; ++i) workers_.emplace_back([this, meter] { work(meter); });
}

void DataLoader::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_available_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

std::optional<Batch> DataLoader::next() {
  const MemoryFor data(MemoryUse::kOther);
  if (workers_.empty()) {
    const Make make = plan_ended_ ? Make() : plan_();
    plan_ended_ = !make;
    if (plan_ended_) return std::nullopt;
    return to_device(pinned(make()), options_.device);
  }
  prefetch();
  if (prefetched_.empty()) return std::nullopt;
  const std::shared_ptr<Slot> slot = std::move(prefetched_.front());
  prefetched_.pop_front();
  {
    std::unique_lock lock(mutex_);
    batch_done_.wait(lock, [&] { return slot->done; });
  }
  prefetch();  // so that no worker is idle while the caller works with this batch
  if (slot->error) std::rethrow_exception(std::exchange(slot->error, nullptr));
  return to_device(std::move(slot->batch), options_.device);
}

void DataLoader::prefetch() {
  const auto most = static_cast<size_t>(options_.num_workers * options_.prefetch_factor);
  while (!plan_ended_ && prefetched_.size() < most) {
    Make make = plan_();
    plan_ended_ = !make;
    if (plan_ended_) return;
    prefetched_.push_back(std::make_shared<Slot>());
    prefetched_.back()->make = std::move(make);
    {
      const std::lock_guard lock(mutex_);
      to_make_.push_back(prefetched_.back());
    }
    work_available_.notify_one();
  }
}

void DataLoader::work(const std::shared_ptr<c10::ThreadLocalDebugInfo>& meter) {
  kernels::use_one_thread();
  const c10::DebugInfoGuard metered(meter);
  const MemoryFor data(MemoryUse::kOther);
  std::unique_lock lock(mutex_);
  for (;;) {
    work_available_.wait(lock, [this] { return stopping_ || !to_make_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<Slot> slot = std::move(to_make_.front());
    to_make_.pop_front();
    lock.unlock();
    try {
      slot->batch = pinned(slot->make());
    } catch (...) {
      slot->error = std::current_exception();
    }
    slot->make = nullptr;
    lock.lock();
    slot->done = true;
    batch_done_.notify_one();
  }
}

Batch DataLoader::pinned(Batch batch) const {
  if (!options_.pin_memory || !options_.device.is_cuda()) return batch;
  const c10::DeviceGuard guard(options_.device);  // page-locked memory belongs to a device's context
  return transform(std::move(batch), [](const at::Tensor& tensor) { return tensor.pin_memory(); });
}

}  // namespace tessera::train

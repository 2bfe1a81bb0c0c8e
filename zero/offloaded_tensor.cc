#include "zero/offloaded_tensor.h"

#include <malloc.h>

#include <algorithm>
#include <span>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "core/memory_use.h"

namespace tessera::zero {

static int64_t sum(const std::vector<int64_t>& sizes) {
  int64_t bytes = 0;
  for (const int64_t size : sizes) bytes += size;
  return bytes;
}

int64_t OffloadStore::reserved(int64_t bytes) {
  constexpr int64_t kPage = SpillFile::kAlignment;
  return (bytes + kPage - 1) / kPage * kPage;
}

static std::vector<int64_t> rounded_up(std::vector<int64_t> sizes, int64_t (*round)(int64_t)) {
  for (int64_t& size : sizes) size = round(size);
  return sizes;
}

/// glibc raises the size from which it maps blocks of their own to 32 MB, once such blocks are freed. Then
/// buffers, gradients and activations of a few megabytes share the heap, which fragments: a third and more of
/// the process was unused memory that it could not give back. (A setting of the process.)
static void map_large_blocks() {
#ifdef __GLIBC__
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
}

OffloadStore::OffloadStore(const OffloadOptions& options, const std::vector<int64_t>& sizes,
                           const std::string& purpose)
    : file_({.directory = options.directory,
             .bytes = sum(rounded_up(sizes, &reserved)),
             .purpose = purpose,
             .probe = options.probe}),
      budget_(options.num_buffers * reserved(*std::max_element(sizes.begin(), sizes.end()))),
      // Smaller buffers are more than options.num_buffers, within the same bytes.
      buffers_(at::kCPU, 8 * options.num_buffers, SpillFile::kAlignment, budget_) {
  map_large_blocks();
}

int64_t OffloadStore::allocate(int64_t bytes) {
  return std::exchange(allocated_, allocated_ + reserved(bytes));
}

/// See [Note: state on disk].
void OffloadStore::make_room(int64_t bytes) {
  while (!has_room(bytes) && !writing_.empty()) writing_.front()->finish_transfer();
  while (!has_room(bytes) && !prefetched_.empty()) {
    OffloadedTensor* const last = prefetched_.back();  // the one that is used last
    last->finish_transfer();
    last->free_buffer();
  }
}

void OffloadStore::finish_writes() {
  const std::lock_guard lock(mutex_);
  while (!writing_.empty()) writing_.front()->finish_transfer();
}

OffloadedTensor::OffloadedTensor(OffloadStore& store, int64_t numel, at::ScalarType dtype,
                                 std::string description)
    : store_(store),
      memory_({.numel = numel, .dtype = dtype, .description = std::move(description)}),
      offset_(store.allocate(memory_.bytes())) {}

/// Nothing may read or write the buffer when it goes; what a transfer says no longer matters.
OffloadedTensor::~OffloadedTensor() {
  const std::lock_guard lock(store_.mutex_);
  try {
    finish_transfer();
  } catch (const Error&) {
    std::erase(store_.writing_, this);
    std::erase(store_.prefetched_, this);
  }
  if (memory_.has_buffer()) free_buffer();
}

std::span<std::byte> OffloadedTensor::buffer_bytes() const {
  return {static_cast<std::byte*>(memory_.contents().data_ptr()),
          static_cast<size_t>(OffloadStore::reserved(memory_.bytes()))};
}

void OffloadedTensor::start_reading(at::Tensor buffer) {
  memory_.hold(std::move(buffer));
  ticket_ = store_.file_.read(offset_, buffer_bytes());
  transfer_ = Transfer::kReading;
}

/// Waits for the transfer under way. What was written and is not in use leaves memory, and so does what could
/// not be read.
void OffloadedTensor::finish_transfer() {
  const Transfer transfer = std::exchange(transfer_, Transfer::kNone);
  if (transfer == Transfer::kNone) return;
  if (transfer == Transfer::kWriting) std::erase(store_.writing_, this);
  try {
    store_.file_.wait(std::exchange(ticket_, 0));
  } catch (...) {
    if (holders_ == 0) free_buffer();
    throw;
  }
  if (transfer == Transfer::kWriting && holders_ == 0) free_buffer();
}

void OffloadedTensor::free_buffer() {
  std::erase(store_.prefetched_, this);
  store_.buffers_.give_back(memory_.release());
}

bool OffloadedTensor::prefetch() {
  const std::lock_guard lock(store_.mutex_);
  if (memory_.has_buffer()) return true;
  const int64_t bytes = OffloadStore::reserved(memory_.bytes());
  while (!store_.has_room(bytes) && !store_.writing_.empty() &&
         store_.file_.done(store_.writing_.front()->ticket_))
    store_.writing_.front()->finish_transfer();
  if (!store_.has_room(bytes)) return false;
  start_reading(store_.buffers_.acquire(bytes));
  store_.prefetched_.push_back(this);
  return true;
}

void OffloadedTensor::acquire(Access access) {
  const std::lock_guard lock(store_.mutex_);
  std::erase(store_.prefetched_, this);
  if (!memory_.has_buffer()) {
    const int64_t bytes = OffloadStore::reserved(memory_.bytes());
    store_.make_room(bytes);
    at::Tensor buffer = store_.buffers_.acquire(bytes);
    if (access == Access::kOverwrite) {
      memory_.hold(std::move(buffer));
    } else {
      start_reading(std::move(buffer));
    }
  }
  ++holders_;
  try {
    // What is being written may be read meanwhile, but not changed.
    if (transfer_ == Transfer::kReading || access != Access::kRead) finish_transfer();
  } catch (...) {
    if (--holders_ == 0) free_buffer();
    throw;
  }
  if (!memory_.bound()) memory_.bind();
  changed_ |= access != Access::kRead;
}

void OffloadedTensor::release() {
  const std::lock_guard lock(store_.mutex_);
  TESSERA_CHECK(holders_ > 0);
  if (--holders_ > 0) return;
  memory_.guard();
  if (std::exchange(changed_, false)) {
    ticket_ = store_.file_.write(offset_, buffer_bytes());
    transfer_ = Transfer::kWriting;
    store_.writing_.push_back(this);
  } else if (transfer_ == Transfer::kNone) {
    free_buffer();
  }
}

void ReadAhead::plan(std::vector<Step> steps) {
  steps_ = std::move(steps);
  next_ = 0;
  read_on(kMaxSteps);
}

void ReadAhead::reached(size_t index) {
  next_ = std::max(next_, index + 1);
  read_on(index + 1 + kMaxSteps);
}

void ReadAhead::read_on(size_t end) {
  for (; next_ < std::min(end, steps_.size()); ++next_)
    for (OffloadedTensor* const tensor : steps_[next_])
      if (!tensor->prefetch()) return;
}

}  // namespace tessera::zero

#include "zero/offload/offloaded_tensor.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/error.h"

namespace tessera::zero {

OffloadedTensor::OffloadedTensor(OffloadStore& store, int64_t numel, at::ScalarType dtype,
                                 std::string description)
    : store_(store),
      memory_({.numel = numel, .dtype = dtype, .description = std::move(description)}),
      number_(static_cast<int>(store.tensors_.size())),
      offset_(store.allocate(memory_.bytes())) {
  const std::lock_guard lock(store_.mutex_);
  store_.tensors_.push_back(this);
}

/// Nothing may read or write the buffer when it goes; what a transfer says no longer matters.
OffloadedTensor::~OffloadedTensor() {
  const std::lock_guard lock(store_.mutex_);
  store_.tensors_[number_] = nullptr;
  std::erase_if(store_.wanted_, [this](const OffloadStore::Wanted& one) { return one.tensor == this; });
  try {
    finish_transfer();
  } catch (const Error&) {
    std::erase(store_.writing_, this);
  }
  if (memory_.has_buffer()) free_buffer();
}

std::span<std::byte> OffloadedTensor::buffer_bytes() const {
  return {static_cast<std::byte*>(memory_.contents().data_ptr()), static_cast<size_t>(reserved())};
}

void OffloadedTensor::start_reading() {
  memory_.hold(store_.buffers_.acquire(reserved()).memory);
  ticket_ = store_.file_.read(offset_, buffer_bytes());
  transfer_ = Transfer::kReading;
  if (holders_ == 0) store_.idle_.push_back(this);
}

/// Starts to write an idle tensor to disk.
void OffloadedTensor::start_writing() {
  std::erase(store_.idle_, this);
  changed_ = false;
  ticket_ = store_.file_.write(offset_, buffer_bytes());
  transfer_ = Transfer::kWriting;
  store_.writing_.push_back(this);
}

/// Waits for the transfer under way. What could not be written stays in memory, and is to be written again;
/// what could not be read is on disk as before.
void OffloadedTensor::finish_transfer() {
  const Transfer transfer = std::exchange(transfer_, Transfer::kNone);
  if (transfer == Transfer::kNone) return;
  if (transfer == Transfer::kWriting) {
    std::erase(store_.writing_, this);
    if (holders_ == 0) store_.idle_.push_back(this);
  }
  try {
    store_.file_.wait(std::exchange(ticket_, 0));
  } catch (...) {
    if (transfer == Transfer::kWriting)
      changed_ = true;
    else
      free_buffer();
    throw;
  }
}

void OffloadedTensor::free_buffer() {
  std::erase(store_.idle_, this);
  changed_ = false;
  store_.buffers_.give_back({memory_.release()});
}

void OffloadedTensor::get_buffer(Access access) {
  if (!memory_.has_buffer()) {
    store_.make_room(reserved());
    if (access == Access::kOverwrite) {
      memory_.hold(store_.buffers_.acquire(reserved()).memory);
    } else {
      start_reading();
    }
  }
  // What is being written may be read meanwhile, but not changed.
  if (transfer_ == Transfer::kReading || access != Access::kRead) finish_transfer();
}

void OffloadedTensor::acquire(Access access) {
  const std::lock_guard lock(store_.mutex_);
  store_.order_.used({.tensor = number_, .overwrite = access == Access::kOverwrite});
  if (holders_++ == 0) {
    std::erase(store_.idle_, this);
    store_.held_bytes_ += reserved();
  }
  const bool without_contents = access == Access::kOverwrite && !memory_.has_buffer();
  try {
    get_buffer(access);
    changed_ |= access != Access::kRead;
    store_.look_ahead();
  } catch (...) {
    let_go();
    if (without_contents && memory_.has_buffer()) free_buffer();
    throw;
  }
  if (!memory_.bound()) memory_.bind();
}

void OffloadedTensor::let_go() {
  if (--holders_ > 0) return;
  store_.held_bytes_ -= reserved();
  if (memory_.bound()) memory_.guard();
  if (memory_.has_buffer() && transfer_ != Transfer::kWriting) store_.idle_.push_back(this);
}

void OffloadedTensor::release() {
  const std::lock_guard lock(store_.mutex_);
  TESSERA_CHECK(holders_ > 0);
  let_go();
  if (holders_ == 0 && changed_ && !store_.wanted(*this)) start_writing();
}

}  // namespace tessera::zero

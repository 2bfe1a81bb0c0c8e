#include "zero/offload/offload_store.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "zero/offload/offloaded_tensor.h"

namespace tessera::zero {

static int64_t sum_rounded_up(const std::vector<int64_t>& sizes) {
  int64_t bytes = 0;
  for (const int64_t size : sizes) bytes += SpillFile::rounded_up(size);
  return bytes;
}

/// Null stands for libtorch's memory.
static std::function<at::Tensor(int64_t)> allocator_of(const OffloadOptions& options) {
  if (!options.transfer) return {};
  return [transfer = options.transfer](int64_t bytes) { return transfer->host_memory(bytes); };
}

OffloadStore::OffloadStore(const OffloadOptions& options, const std::vector<int64_t>& sizes,
                           const std::string& purpose)
    : file_({.directory = options.directory, .bytes = sum_rounded_up(sizes), .purpose = purpose}),
      budget_(options.num_buffers * SpillFile::rounded_up(*std::max_element(sizes.begin(), sizes.end()))),
      // Smaller buffers are more than options.num_buffers, within the same bytes.
      buffers_({.max_free = 8 * options.num_buffers,
                .alignment = SpillFile::kAlignment,
                .max_bytes = budget_,
                .allocate = allocator_of(options)}) {}

int64_t OffloadStore::allocate(int64_t bytes) {
  return std::exchange(allocated_, allocated_ + SpillFile::rounded_up(bytes));
}

void OffloadStore::begin_step() {
  const std::lock_guard lock(mutex_);
  order_.begin_step();
}

void OffloadStore::expect(const std::vector<OffloadedTensor*>& tensors) {
  const std::lock_guard lock(mutex_);
  std::vector<int> numbers;
  numbers.reserve(tensors.size());
  for (const OffloadedTensor* tensor : tensors) numbers.push_back(tensor->number_);
  order_.expect(std::move(numbers));
}

bool OffloadStore::wanted(const OffloadedTensor& tensor) const { return tensor.wanted_in_ == look_; }

/// What comes next and has room beside what is held.
void OffloadStore::find_wanted() {
  ++look_;
  wanted_.clear();
  int64_t bytes = held_bytes_;
  order_.for_each_next([&](AccessOrder::Use next) {
    OffloadedTensor* const tensor = tensors_[next.tensor];
    if (tensor == nullptr || wanted(*tensor)) return true;
    if (tensor->holders_ == 0) bytes += tensor->reserved();
    if (bytes > budget_) return false;
    tensor->wanted_in_ = look_;
    wanted_.push_back({tensor, next.overwrite});
    return wanted_.size() < tensors_.size();
  });
}

/// Throws what a write has failed with.
void OffloadStore::look_ahead() {
  find_wanted();
  for (OffloadedTensor* const tensor : std::vector(idle_))
    if (tensor->changed_ && !wanted(*tensor)) tensor->start_writing();
  for (const Wanted& next : wanted_) {
    if (next.tensor->memory_.has_buffer() || next.overwrite) continue;
    const int64_t bytes = next.tensor->reserved();
    free_unwanted(bytes);
    if (!has_room(bytes)) return;
    next.tensor->start_reading();
  }
}

/// Returns, of the tensors that could go at once, the one that is used last. Null: there is none.
OffloadedTensor* OffloadStore::used_last_of_unwanted() const {
  std::vector<OffloadedTensor*> candidates;
  for (OffloadedTensor* const tensor : idle_)
    if (!wanted(*tensor) && !tensor->changed_ && tensor->transfer_done()) candidates.push_back(tensor);
  if (candidates.empty()) return nullptr;
  order_.for_each_next([&](AccessOrder::Use next) {
    if (candidates.size() > 1) std::erase(candidates, tensors_[next.tensor]);
    return candidates.size() > 1;
  });
  return candidates.front();
}

/// Frees buffers until `bytes` have room, as far as that takes no wait.
void OffloadStore::free_unwanted(int64_t bytes) {
  const auto reap = [&] {
    if (writing_.empty() || !writing_.front()->transfer_done()) return false;
    writing_.front()->finish_transfer();
    return true;
  };
  while (!has_room(bytes)) {
    if (OffloadedTensor* const tensor = used_last_of_unwanted()) {
      tensor->finish_transfer();
      tensor->free_buffer();
    } else if (!reap()) {
      return;
    }
  }
}

/// See [Note: state on disk].
void OffloadStore::make_room(int64_t bytes) {
  free_unwanted(bytes);
  while (!has_room(bytes) && !writing_.empty()) {
    writing_.front()->finish_transfer();
    free_unwanted(bytes);
  }
  while (!has_room(bytes) && !idle_.empty()) {
    const auto last = std::find_if(wanted_.rbegin(), wanted_.rend(), [&](const Wanted& one) {
      return std::find(idle_.begin(), idle_.end(), one.tensor) != idle_.end();
    });
    OffloadedTensor* const tensor = last == wanted_.rend() ? idle_.front() : last->tensor;
    if (tensor->changed_) tensor->start_writing();
    tensor->finish_transfer();
    tensor->free_buffer();
  }
}

void OffloadStore::flush() {
  const std::lock_guard lock(mutex_);
  for (OffloadedTensor* const tensor : std::vector(idle_))
    if (tensor->changed_) tensor->start_writing();
  while (!writing_.empty()) writing_.front()->finish_transfer();
}

}  // namespace tessera::zero

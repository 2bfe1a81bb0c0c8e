#include "comm/p2p/group.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/shm/shared_regions.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm::p2p {

using shm::at_offset;
using shm::slice_of;

Group::Group(std::shared_ptr<Device> device, std::shared_ptr<shm::PeerSockets> peers, GroupOptions options)
    : device_(std::move(device)),
      peers_(std::move(peers)),
      options_(std::move(options)),
      memory_(device_, peers_, options_.timeout),
      issued_(options_.first_number - 1),
      checked_(issued_) {
  if (size() > kMaxRanks)
    throw CommError(str(size(), " ranks on one host: backend \"p2p\" takes at most ", kMaxRanks));
  try {
    set_up();
  } catch (const std::exception&) {
    peers_->disconnect();  // the others must not wait for this rank
    throw;
  }
  watcher_ = std::thread([this] { watch(); });
}

void Group::set_up() {
  const int64_t bytes = shm::whole_pages(Flags::bytes(size()));
  flags_memory_ = shm::share_memory(*peers_, bytes, options_.timeout, [] {});
  flags_registration_ = device_->register_flags(flags_memory_.data(), bytes);
  flags_.emplace(flags_memory_.data(), rank(), size());
  flags_->issued(rank()).store(issued_, std::memory_order_release);
  flags_->checked(rank()).store(checked_, std::memory_order_release);
  memory_.allocate(2 * device_->half_mailbox_bytes(), [] {});
  stream_ = device_->make_stream();
}

std::shared_ptr<Region> Group::allocate(int64_t bytes) {
  check_own();  // a rank that has left may have sent the reason: receiving tells
  return memory_.allocate(bytes, [this] {
    check_all_there();
    watch_();
  });
}

// ------------------------------------------------------------------------------------------ collectives

Issued Group::reduce_scatter(const void* full, DType dtype, int64_t numel, const shm::ReduceOutput& output,
                             uint32_t tag) {
  const int64_t element_bytes = size_bytes(dtype), slice_bytes = numel * element_bytes;
  stream_->follow_current();
  if (const auto input = memory_.find(full, size() * slice_bytes)) {
    const uint64_t number = post(*input, tag);
    wait_for_all(Flags::kPosted, number);
    reduce({input->region, input->offset + rank() * slice_bytes}, dtype, numel, output);
    return finish(number, /*others_read_my_buffer=*/true);
  }
  // A piece is a part of each slice, one rank's after another's.
  const int64_t longest = device_->half_mailbox_bytes() / size() / element_bytes;
  Issued last;
  for (int64_t begin = 0; begin < numel; begin += longest) {
    const int64_t n = std::min(longest, numel - begin), bytes = n * element_bytes;
    const Location half = next_half();
    for (int owner = 0; owner < size(); ++owner)
      copy(memory_.address(half, rank()) + owner * bytes,
           static_cast<const std::byte*>(full) + owner * slice_bytes + begin * element_bytes, bytes);
    const uint64_t number = post(half, tag);
    wait_for_all(Flags::kPosted, number);
    reduce({half.region, half.offset + rank() * bytes}, dtype, n, at_offset(output, begin));
    last = finish_half(number);
  }
  return last;
}

Issued Group::all_reduce(void* full, DType dtype, int64_t numel, double scale, uint32_t tag) {
  const int64_t element_bytes = size_bytes(dtype);
  auto* output = static_cast<std::byte*>(full);
  stream_->follow_current();
  if (const auto input = memory_.find(full, numel * element_bytes)) {
    const uint64_t number = post(*input, tag);
    reduce_then_gather(*input, number, dtype, numel, scale, output);
    return finish(number, /*others_read_my_buffer=*/true);
  }
  const int64_t longest = device_->half_mailbox_bytes() / element_bytes;
  Issued last;
  for (int64_t begin = 0; begin < numel; begin += longest) {
    const int64_t n = std::min(longest, numel - begin);
    const Location half = next_half();
    copy(memory_.address(half, rank()), output + begin * element_bytes, n * element_bytes);
    const uint64_t number = post(half, tag);
    reduce_then_gather(half, number, dtype, n, scale, output + begin * element_bytes);
    last = finish_half(number);
  }
  return last;
}

/// Each rank sums its slice in its own memory, then copies all slices to `output`.
void Group::reduce_then_gather(const Location& input, uint64_t number, DType dtype, int64_t numel,
                               double scale, std::byte* output) {
  const int64_t element_bytes = size_bytes(dtype);
  const auto [first, count] = slice_of(numel, rank(), size());
  const Location mine{input.region, input.offset + first * element_bytes};
  wait_for_all(Flags::kPosted, number);
  reduce(mine, dtype, count, {memory_.address(mine, rank()), dtype, scale, false});
  write(Flags::kReduced, number);
  for (int owner = 0; owner < size(); ++owner) {
    const auto [begin, n] = slice_of(numel, owner, size());
    const int64_t offset = begin * element_bytes;
    if (owner != rank()) wait_for(Flags::kReduced, number, owner);
    copy(output + offset, memory_.address(input, owner) + offset, n * element_bytes);
  }
}

Issued Group::all_gather(void* full, const void* shard, int64_t bytes, uint32_t tag) {
  auto* output = static_cast<std::byte*>(full);
  stream_->follow_current();
  copy(output + rank() * bytes, shard, bytes);
  if (const auto input = memory_.find(full, size() * bytes)) {
    const uint64_t number = post(*input, tag);
    for (int other = 0; other < size(); ++other) {
      if (other == rank()) continue;
      wait_for(Flags::kPosted, number, other);
      copy(output + other * bytes, memory_.address(*input, other) + other * bytes, bytes);
    }
    return finish(number, /*others_read_my_buffer=*/true);
  }
  const int64_t longest = device_->half_mailbox_bytes();
  Issued last;
  for (int64_t begin = 0; begin < bytes; begin += longest) {
    const int64_t n = std::min(longest, bytes - begin);
    const Location half = next_half();
    copy(memory_.address(half, rank()), output + rank() * bytes + begin, n);
    const uint64_t number = post(half, tag);
    for (int other = 0; other < size(); ++other) {
      if (other == rank()) continue;
      wait_for(Flags::kPosted, number, other);
      copy(output + other * bytes + begin, memory_.address(half, other), n);
    }
    last = finish_half(number);
  }
  return last;
}

Issued Group::broadcast(void* buffer, int64_t bytes, int root, uint32_t tag) {
  const bool is_root = rank() == root;
  stream_->follow_current();
  const auto take = [&](const Location& input, void* to, int64_t n, uint64_t number) {
    if (is_root) return;
    wait_for(Flags::kPosted, number, root);
    copy(to, memory_.address(input, root), n);
  };
  if (const auto input = memory_.find(buffer, bytes)) {
    const uint64_t number = post(*input, tag);
    take(*input, buffer, bytes, number);
    return finish(number, is_root);
  }
  const int64_t longest = device_->half_mailbox_bytes();
  Issued last;
  for (int64_t begin = 0; begin < bytes; begin += longest) {
    const int64_t n = std::min(longest, bytes - begin);
    std::byte* piece = static_cast<std::byte*>(buffer) + begin;
    const Location half = next_half();
    if (is_root) copy(memory_.address(half, rank()), piece, n);
    const uint64_t number = post(half, tag);
    take(half, piece, n, number);
    last = finish_half(number);
  }
  return last;
}

Issued Group::barrier(uint32_t tag) {
  stream_->follow_current();
  const uint64_t number = post({}, tag);
  wait_for_all(Flags::kPosted, number);
  return finish(number, /*others_read_my_buffer=*/false);
}

// ------------------------------------------------------------------------------- what the stream is given

uint64_t Group::post(const Location& input, uint32_t tag) {
  check_all_there();  // no operation with a rank that has given up
  const uint64_t number = issued_ + 1;
  await_room(number);
  flags_->write_key(number, {tag, input.region, input.offset});
  {
    const std::lock_guard lock(mutex_);
    issued_ = number;
    unfinished_.push_back({number, tag, std::chrono::steady_clock::now() + options_.timeout});
  }
  flags_->issued(rank()).store(number, std::memory_order_release);
  write(Flags::kPosted, number);
  return number;
}

void Group::write(Flags::Counter counter, uint64_t number) {
  const auto upper = static_cast<uint32_t>(number >> 32);
  const bool changes = std::exchange(upper_halves_[counter], upper) != upper;
  stream_->write(flags_->flag(counter, rank()), number, changes);
}

void Group::wait_for(Flags::Counter counter, uint64_t number, int rank) {
  stream_->wait(flags_->flag(counter, rank), number);
}

void Group::wait_for_all(Flags::Counter counter, uint64_t number) {
  for (int other = 0; other < size(); ++other)
    if (other != rank()) wait_for(counter, number, other);
}

void Group::copy(void* to, const void* from, int64_t bytes) {
  if (to != from && bytes > 0) stream_->copy(to, from, bytes);
}

void Group::reduce(const Location& input, DType dtype, int64_t numel, const shm::ReduceOutput& output) {
  if (numel == 0) return;
  std::vector<const void*> inputs;
  for (int other = 0; other < size(); ++other) inputs.push_back(memory_.address(input, other));
  stream_->reduce(
      {.dtype = dtype, .inputs = inputs.data(), .num_inputs = size(), .numel = numel, .output = output});
}

Issued Group::finish(uint64_t number, bool others_read_my_buffer) {
  write(Flags::kDone, number);
  if (others_read_my_buffer) wait_for_all(Flags::kDone, number);
  return {number, stream_->now()};
}

Group::Location Group::next_half() {
  half_ = 1 - half_;
  if (half_used_[half_] > 0) wait_for_all(Flags::kDone, half_used_[half_]);
  return {kMailbox, half_ * device_->half_mailbox_bytes()};
}

Issued Group::finish_half(uint64_t number) {
  half_used_[half_] = number;
  return finish(number, /*others_read_my_buffer=*/false);
}

}  // namespace tessera::comm::p2p

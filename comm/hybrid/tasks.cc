#include "comm/hybrid/tasks.h"

#include <algorithm>

namespace tessera::comm::hybrid {
namespace {

// On several hosts. On one host nothing is gained by smaller pieces, and its slots take as little memory as
// keeps copies fast.
constexpr int64_t kPieceBytes = 4 << 20;
constexpr int64_t kSlotBytes = 1 << 20, kSlotBytesOnOneHost = 512 << 10;
/// Pieces begin at multiples of this many elements of their slice.
constexpr int64_t kAlignment = 64;

/// Returns how much of each slice of a buffer goes into `limit` bytes; the buffer has one slice a rank.
int64_t longest_part(int64_t slice_numel, int count, int64_t element_bytes, int64_t limit) {
  const int64_t numel = limit / (count * element_bytes) / kAlignment * kAlignment;
  return std::min(slice_numel, std::max(numel, kAlignment));
}

}  // namespace

int64_t Staging::bytes_for(const Hosts& hosts) {
  const int64_t smallest = hosts.num_ranks() * kAlignment * 8;  // one part of each slice, of the widest dtype
  return shm::whole_pages(std::max(hosts.is_one() ? kSlotBytesOnOneHost : kSlotBytes, smallest));
}

int64_t element_bytes(const Operation& operation) {
  return reduces(operation.kind) ? operation.full.element_size() : 1;
}

std::vector<Task> cut(const OperationPtr& operation, const Hosts& hosts, const Staging& staging,
                      const HostMemory* in_place, const shm::SharedRegions::Location& location) {
  std::vector<Task> tasks;
  const auto add = [&](const Slices& user, const Slices& staged, int64_t into_begin) {
    Task& task = tasks.emplace_back();
    task.operation = operation;
    task.user = user;
    task.work = in_place != nullptr ? user : staged;
    task.memory = in_place != nullptr ? *in_place : staging.memory;
    task.location = in_place != nullptr ? location : staging.location;
    task.slot = in_place != nullptr ? -1 : 0;
    task.into_begin = into_begin;
  };
  if (operation->kind == Kind::kBarrier) {
    add({}, {}, 0);
    tasks.back().slot = -1;
    tasks.back().location = {};
    return tasks;
  }
  const int64_t bytes = element_bytes(*operation);
  const int64_t numel = static_cast<int64_t>(operation->full.nbytes()) / bytes;
  const int64_t whole = numel * bytes + hosts.num_ranks() * kAlignment * bytes;  // with each slice rounded up
  const int64_t limit = in_place == nullptr ? staging.slot_bytes : hosts.is_one() ? whole : kPieceBytes;
  if (operation->kind == Kind::kReduceScatter || operation->kind == Kind::kAllGather) {
    const int count = hosts.num_ranks();
    // A gather on one host brings nothing into a rank's slot but its own slice, which then has all of it.
    const bool fills_slot = operation->kind == Kind::kAllGather && in_place == nullptr && hosts.is_one();
    const int64_t slice = numel / count, longest = longest_part(slice, fills_slot ? 1 : count, bytes, limit);
    for (int64_t begin = 0; begin < slice; begin += longest) {
      const int64_t part = std::min(longest, slice - begin);
      const Slices staged = fills_slot ? Slices{0, 0, part, part} : Slices{0, part, part, part * count};
      add({begin, slice, part, numel}, staged, begin);
    }
    return tasks;
  }
  const int count = operation->kind == Kind::kBroadcast ? hosts.num_columns() : hosts.num_ranks();
  const int64_t longest = std::max(limit / bytes / kAlignment * kAlignment, kAlignment);
  for (int64_t begin = 0; begin < numel; begin += longest) {
    const int64_t end = std::min(numel, begin + longest);
    add(evenly(begin, end, count), evenly(0, end - begin, count), 0);
  }
  return tasks;
}

}  // namespace tessera::comm::hybrid

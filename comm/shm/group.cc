#include "comm/shm/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>

#include "comm/explain.h"
#include "comm/liveness.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using Counter = Board::Counter;

constexpr int64_t kHalfMailbox = 512 << 10;
/// Waits longer than this look whether the others are still alive.
constexpr milliseconds kNap{20};
/// A wait begins with this many looks, a few microseconds in all: most waits are short.
constexpr int kLooks = 200;

int64_t whole_pages(int64_t bytes) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

/// Collective. Rank 0 makes it, the others receive it. `watch` throws when
/// there is no use in waiting any longer.
SharedMemory share(Peers& peers, int64_t bytes, milliseconds timeout, const std::function<void()>& watch) {
  if (peers.rank() == 0) {
    SharedMemory memory;
    try {
      memory = SharedMemory::create(bytes);
    } catch (const CommError&) {
      for (int other = 1; other < peers.size(); ++other) peers.send(other, -1, bytes, timeout);
      throw;
    }
    for (int other = 1; other < peers.size(); ++other) peers.send(other, memory.fd(), bytes, timeout);
    memory.close_fd();
    return memory;
  }
  Peers::Received received = peers.receive(0, timeout, watch);
  if (received.number != bytes)
    throw CommError(str("rank ", peers.rank(), " expects ", bytes, " bytes of shared memory, rank 0 made ",
                        received.number));
  if (!received.fd) throw CommError(str("rank 0 found no ", mebibytes(bytes), " MiB of shared memory"));
  try {
    SharedMemory memory = SharedMemory::adopt(std::move(received.fd), bytes);
    memory.close_fd();
    return memory;
  } catch (const CommError&) {
    peers.break_off();  // rank 0 believes that this rank has it
    throw;
  }
}

Into at_offset(const Into& into, int64_t numel) {
  Into moved = into;
  if (into.output != nullptr)
    moved.output = static_cast<std::byte*>(into.output) + numel * size_of(into.element);
  return moved;
}

/// Cuts [0, numel) into what the mailbox takes at a time; post_piece(begin, count) posts
/// each. Returns the last one's number.
template <class PostPiece>
uint64_t in_pieces(int64_t numel, int64_t element_bytes, const PostPiece& post_piece) {
  const int64_t piece = kHalfMailbox / element_bytes;
  uint64_t last = 0;
  for (int64_t begin = 0; begin < numel; begin += piece)
    last = post_piece(begin, std::min(piece, numel - begin));
  return last;
}

void copy(void* to, const void* from, int64_t bytes) {
  if (to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

Group::Group(std::shared_ptr<Peers> peers, milliseconds timeout)
    : peers_(std::move(peers)), timeout_(timeout) {
  board_memory_ = share(*peers_, whole_pages(Board::bytes(size())), timeout_, [] {});
  board_.emplace(board_memory_.data(), rank(), size());
  allocate(2 * kHalfMailbox, /*common=*/false);
}

Group::~Group() = default;

std::shared_ptr<Group::Region> Group::allocate(int64_t bytes, bool common) {
  if (rank() == 0 || board_->has_left(rank()))
    check_alive();  // the others look once nothing has come: rank 0 says why it leaves
  const int64_t pages = whole_pages(std::max<int64_t>(bytes, 1));
  auto region = std::make_shared<Region>();
  region->stride = common ? 0 : pages;
  region->memory = share(*peers_, common ? pages : size() * pages, timeout_, [this] { check_alive(); });
  regions_.push_back(region);
  return region;
}

std::optional<Group::Place> Group::find(const void* begin, int64_t bytes) const {
  const auto* first = static_cast<const std::byte*>(begin);
  for (size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = *regions_[i];
    const std::byte* base = region.of(rank());
    if (first >= base && first + bytes <= base + (region.common() ? region.memory.bytes() : region.stride))
      return Place{static_cast<int>(i), first - base, region.common()};
  }
  return std::nullopt;
}

const std::byte* Group::input(const Place& place, int rank) const {
  return regions_[place.region]->of(rank) + place.offset;
}

const void* Group::peer_address(const void* mine, int64_t bytes, int rank) const {
  const auto place = find(mine, bytes);
  return place && !place->common ? input(*place, rank) : nullptr;
}

// ------------------------------------------------------------------------------------------ issuing

uint64_t Group::reduce_scatter(const void* full, Element element, int64_t numel, const Into& into,
                               uint32_t tag) {
  const int64_t bytes = numel * size_of(element);
  Operation operation{
      .kind = Kind::kReduceScatter, .place = {}, .element = element, .numel = numel, .into = into};
  if (const auto place = find(full, size() * bytes)) {
    TESSERA_CHECK(!place->common);
    return post_in_place(operation, *place, tag);
  }
  operation.kind = Kind::kSum;
  uint64_t last = 0;
  for (int owner = 0; owner < size(); ++owner)
    last = in_pieces(numel, size_of(element), [&](int64_t begin, int64_t count) {
      operation.numel = count;
      operation.into = owner == rank() ? at_offset(into, begin) : Into{};
      const auto* data = static_cast<const std::byte*>(full) + owner * bytes + begin * size_of(element);
      return post_from_mailbox(operation, data, count * size_of(element), tag);
    });
  return last;
}

uint64_t Group::all_reduce(void* full, Element element, int64_t numel, double scale, uint32_t tag) {
  const Into into{full, element, scale, false};
  Operation operation{
      .kind = Kind::kAllReduce, .place = {}, .element = element, .numel = numel, .into = into};
  if (const auto place = find(full, numel * size_of(element))) {
    TESSERA_CHECK(!place->common);
    return post_in_place(operation, *place, tag);
  }
  operation.kind = Kind::kSum;
  return in_pieces(numel, size_of(element), [&](int64_t begin, int64_t count) {
    operation.numel = count;
    operation.into = at_offset(into, begin);
    return post_from_mailbox(operation, operation.into.output, count * size_of(element), tag);
  });
}

uint64_t Group::all_gather(void* full, const void* shard, int64_t bytes, uint32_t tag) {
  auto* output = static_cast<std::byte*>(full);
  copy(output + rank() * bytes, shard, bytes);
  Operation operation{
      .kind = Kind::kGather, .place = {}, .numel = bytes, .into = {output}, .into_stride = bytes};
  if (const auto place = find(full, size() * bytes)) {
    operation.input_stride = bytes;
    return post_in_place(operation, *place, tag);
  }
  return in_pieces(bytes, 1, [&](int64_t begin, int64_t count) {
    operation.numel = count;
    operation.into.output = output + begin;
    return post_from_mailbox(operation, output + rank() * bytes + begin, count, tag);
  });
}

uint64_t Group::broadcast(void* buffer, int64_t bytes, int root, uint32_t tag) {
  auto* output = static_cast<std::byte*>(buffer);
  Operation operation{.kind = Kind::kBroadcast, .place = {}, .numel = bytes, .into = {output}, .root = root};
  if (const auto place = find(buffer, bytes)) return post_in_place(operation, *place, tag);
  return in_pieces(bytes, 1, [&](int64_t begin, int64_t count) {
    operation.numel = count;
    operation.into.output = output + begin;
    return post_from_mailbox(operation, output + begin, rank() == root ? count : 0, tag);
  });
}

uint64_t Group::barrier(uint32_t tag) { return post({}, tag); }

/// The others read the caller's own memory. What is common to all is there already, once they have come.
uint64_t Group::post_in_place(Operation operation, const Place& place, uint32_t tag) {
  operation.place = place;
  operation.buffer_is_input = !place.common;
  if (place.common) operation.kind = Kind::kBarrier;
  return post(operation, tag);
}

uint64_t Group::post_from_mailbox(Operation operation, const void* data, int64_t bytes, uint32_t tag) {
  const int half = std::exchange(next_half_, 1 - next_half_);
  await_all_done(mailbox_used_[half]);
  operation.place = {kMailbox, half * kHalfMailbox, false};
  if (bytes > 0)
    std::memcpy(regions_[kMailbox]->of(rank()) + operation.place.offset, data, static_cast<size_t>(bytes));
  return mailbox_used_[half] = post(operation, tag);
}

uint64_t Group::post(const Operation& operation, uint32_t tag) {
  check_alive();  // whoever gave up on this rank must not be taken for a partner, though its input is there
  const uint64_t number = posted_ + 1;
  if (number > kMaxUnderWay) await_all_done(number - kMaxUnderWay);
  operations_[number % kMaxUnderWay] = operation;
  board_->write(number, {tag, operation.place.region, operation.place.offset});
  posted_ = number;
  board_->set(Counter::kPosted, number);
  move_on();
  return number;
}

// --------------------------------------------------------------------------------------- moving on

bool Group::all_posted(uint64_t number) const {
  if (!board_->all_at(Counter::kPosted, number)) return false;
  const Entry& mine = board_->entry(number, rank());
  for (int other = 0; other < size(); ++other)
    if (board_->entry(number, other) != mine)
      throw CommError(str("rank ", rank(), " and rank ", other, " issued different collectives"));
  return true;
}

void Group::move_on() {
  // After a failure the callers' buffers may be gone.
  if (board_->has_left(rank())) throw CommError(str("rank ", rank(), " has left the group"));
  while (served_ < posted_ && serve(served_ + 1)) board_->set(Counter::kServed, ++served_);
  while (done_ < served_ && complete(done_ + 1)) board_->set(Counter::kDone, ++done_);
}

void Group::sum(const Operation& operation, int64_t begin, int64_t numel, const Into& into) const {
  std::vector<const void*> inputs;
  for (int other = 0; other < size(); ++other)
    inputs.push_back(input(operation.place, other) + begin * size_of(operation.element));
  add_up({.element = operation.element,
          .inputs = inputs.data(),
          .num_inputs = size(),
          .numel = numel,
          .output = into.output,
          .output_element = into.element,
          .scale = into.scale,
          .add = into.add});
}

/// An all-reduce is cut as evenly as can be.
static std::pair<int64_t, int64_t> slice_of(int64_t numel, int rank, int size) {
  const int64_t most = (numel + size - 1) / size;
  const int64_t begin = std::min(numel, rank * most);
  return {begin, std::min(most, numel - begin)};
}

bool Group::serve(uint64_t number) {
  const Operation& operation = operations_[number % kMaxUnderWay];
  if (operation.kind != Kind::kReduceScatter && operation.kind != Kind::kAllReduce) return true;
  if (!all_posted(number)) return false;
  if (operation.kind == Kind::kReduceScatter) {
    sum(operation, rank() * operation.numel, operation.numel, operation.into);
  } else {
    const auto [begin, numel] = slice_of(operation.numel, rank(), size());
    sum(operation, begin, numel, at_offset(operation.into, begin));
  }
  return true;
}

bool Group::complete(uint64_t number) {
  const Operation& operation = operations_[number % kMaxUnderWay];
  auto* output = static_cast<std::byte*>(operation.into.output);
  switch (operation.kind) {
    case Kind::kReduceScatter: return true;
    case Kind::kBarrier: return all_posted(number);
    case Kind::kAllReduce:
      if (!board_->all_at(Counter::kServed, number)) return false;
      for (int other = 0; other < size(); ++other) {
        const auto [begin, numel] = slice_of(operation.numel, other, size());
        const int64_t offset = begin * size_of(operation.element);
        if (other != rank())
          copy(output + offset, input(operation.place, other) + offset, numel * size_of(operation.element));
      }
      return true;
    case Kind::kGather:
      if (!all_posted(number)) return false;
      for (int other = 0; other < size(); ++other)
        if (other != rank())
          copy(output + other * operation.into_stride,
               input(operation.place, other) + other * operation.input_stride, operation.numel);
      return true;
    case Kind::kBroadcast:
      if (!all_posted(number)) return false;
      if (rank() != operation.root) copy(output, input(operation.place, operation.root), operation.numel);
      return true;
    case Kind::kSum:
      if (!all_posted(number)) return false;
      if (output != nullptr) sum(operation, 0, operation.numel, operation.into);
      return true;
  }
  return true;
}

bool Group::finished(uint64_t number) const {
  if (done_ < number) return false;
  if (number + kMaxUnderWay <= posted_) return true;  // another operation has its place by now
  return !operations_[number % kMaxUnderWay].buffer_is_input || board_->all_at(Counter::kDone, number);
}

// ------------------------------------------------------------------------------------------ waiting

void Group::check_alive() const {
  for (int other = 0; other < size(); ++other)
    if (board_->has_left(other))
      throw CommError(other == rank() ? str("rank ", other, " has left the group")
                                      : str("rank ", other, " left"));
}

bool Group::test(uint64_t number) {
  move_on();
  if (finished(number)) return true;
  check_alive();
  return false;
}

// Moves on until `arrived`, and says when somebody will never come. False after `limit`.
template <class Arrived>
bool Group::await(const Arrived& arrived, milliseconds limit) {
  static const bool crowded = static_cast<unsigned>(size()) > std::thread::hardware_concurrency();
  for (int look = 0; look < (crowded ? 1 : kLooks); ++look) {
    if (arrived()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  const auto deadline = steady_clock::now() + limit;
  while (true) {
    const uint32_t seen = board_->bell();
    if (arrived()) return true;
    check_alive();
    const auto now = steady_clock::now();
    if (now >= deadline) return false;
    board_->sleep(seen, std::min<std::chrono::microseconds>(
                            kNap, std::chrono::ceil<std::chrono::microseconds>(deadline - now)));
    if (steady_clock::now() < now + kNap) continue;
    const auto gone = peers_->gone();
    if (gone && !arrived()) throw RankIsGone(*gone);
  }
}

bool Group::wait(uint64_t number, milliseconds limit) {
  return await([&] { return test(number); }, limit);
}

void Group::await_all_done(uint64_t number) {
  const auto all_done = [&] {
    move_on();
    return board_->all_at(Counter::kDone, number);
  };
  if (number > 0 && !await(all_done, timeout_))
    throw CommError(str("timed out after ", name_duration(timeout_)));
}

void Group::abort() { board_->leave(); }

}  // namespace tessera::comm::shm

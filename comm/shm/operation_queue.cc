#include "comm/shm/operation_queue.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "comm/control/error_message.h"
#include "comm/control/liveness.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using Counter = ProgressCounters::Counter;

constexpr int64_t kHalfMailbox = 512 << 10;
/// A wait longer than this checks whether the other ranks are alive, and again after every such time.
constexpr milliseconds kPollInterval{20};
/// How often a wait of the queue's own calls `watch`.
constexpr milliseconds kOwnWatchInterval{100};
/// A wait first checks this often without sleeping, a few microseconds in all: most waits are short.
constexpr int kNumSpins = 200;

}  // namespace

OperationQueue::OperationQueue(std::shared_ptr<PeerSockets> peers, milliseconds timeout)
    : peers_(std::move(peers)),
      timeout_(timeout),
      // With more ranks than cores, spinning takes the time of the rank that is waited for.
      num_spins_(static_cast<unsigned>(size()) > std::thread::hardware_concurrency() ? 1 : kNumSpins),
      regions_(peers_, timeout) {
  counters_memory_ = share_memory(*peers_, whole_pages(ProgressCounters::bytes(size())), timeout_, [] {});
  counters_.emplace(counters_memory_.data(), rank(), size());
  allocate(2 * kHalfMailbox, /*common=*/false);
}

OperationQueue::~OperationQueue() = default;

std::shared_ptr<SharedRegion> OperationQueue::allocate(int64_t bytes, bool common) {
  // The other ranks check while they wait: rank 0 sends the reason why there is no memory.
  if (rank() == 0 || counters_->has_left(rank())) check_alive();
  return regions_.allocate(bytes, common, [this] {
    check_alive();
    watch_();
  });
}

const void* OperationQueue::peer_address(const void* mine, int64_t bytes, int rank) const {
  return regions_.peer_address(mine, bytes, rank);
}

// ------------------------------------------------------------------------------------------ issuing

uint64_t OperationQueue::reduce_scatter(const void* full, DType dtype, int64_t numel,
                                        const ReduceOutput& output, uint32_t tag) {
  const int64_t slice_bytes = numel * size_bytes(dtype);
  Operation operation{
      .kind = Kind::kReduceScatter, .input = {}, .dtype = dtype, .numel = numel, .output = output};
  if (const auto input = regions_.find(full, size() * slice_bytes))
    return post_in_place(operation, *input, tag);
  operation.kind = Kind::kReduceFromMailbox;
  uint64_t last = 0;
  for (int owner = 0; owner < size(); ++owner) {
    operation.output = owner == rank() ? output : ReduceOutput{};
    last = post_from_mailbox(operation, static_cast<const std::byte*>(full) + owner * slice_bytes, tag);
  }
  return last;
}

uint64_t OperationQueue::all_reduce(void* full, DType dtype, int64_t numel, double scale, uint32_t tag) {
  Operation operation{.kind = Kind::kAllReduce,
                      .input = {},
                      .dtype = dtype,
                      .numel = numel,
                      .output = {full, dtype, scale, false}};
  if (const auto input = regions_.find(full, numel * size_bytes(dtype)))
    return post_in_place(operation, *input, tag);
  operation.kind = Kind::kReduceFromMailbox;
  return post_from_mailbox(operation, full, tag);
}

uint64_t OperationQueue::all_gather(void* full, const void* shard, int64_t bytes, uint32_t tag) {
  auto* own_slice = static_cast<std::byte*>(full) + rank() * bytes;
  copy_bytes(own_slice, shard, bytes);
  Operation operation{.kind = Kind::kAllGather,
                      .input = {},
                      .dtype = DType::kUInt8,
                      .numel = bytes,
                      .output = {full, DType::kUInt8},
                      .output_stride = bytes};
  if (const auto input = regions_.find(full, size() * bytes)) {
    operation.input_stride = bytes;
    return post_in_place(operation, *input, tag);
  }
  return post_from_mailbox(operation, own_slice, tag);
}

uint64_t OperationQueue::broadcast(void* buffer, int64_t bytes, int root, uint32_t tag) {
  const Operation operation{.kind = Kind::kBroadcast,
                            .input = {},
                            .dtype = DType::kUInt8,
                            .numel = bytes,
                            .output = {buffer, DType::kUInt8},
                            .root = root};
  if (const auto input = regions_.find(buffer, bytes)) return post_in_place(operation, *input, tag);
  return post_from_mailbox(operation, rank() == root ? buffer : nullptr, tag);
}

uint64_t OperationQueue::barrier(uint32_t tag) { return post({}, tag); }

/// The others read the caller's own memory. In memory that is common to all ranks, a gather or broadcast only
/// has to wait until the others have posted: the data are there already.
uint64_t OperationQueue::post_in_place(Operation operation, const InputLocation& input, uint32_t tag) {
  const bool is_common = regions_.region(input).is_common();
  TESSERA_CHECK(!is_common || operation.kind == Kind::kAllGather || operation.kind == Kind::kBroadcast);
  operation.input = input;
  operation.buffer_is_input = !is_common;
  if (is_common) operation.kind = Kind::kBarrier;
  return post(operation, tag);
}

/// Posts in chunks that half of the mailbox holds. `data`: null where this rank has no input. Returns the
/// last chunk's number.
uint64_t OperationQueue::post_from_mailbox(const Operation& whole, const void* data, uint32_t tag) {
  const int64_t element_bytes = size_bytes(whole.dtype), longest = kHalfMailbox / element_bytes;
  uint64_t last = 0;
  for (int64_t begin = 0; begin < whole.numel; begin += longest) {
    const int half = std::exchange(next_half_, 1 - next_half_);
    await_all_done(mailbox_used_[half]);
    Operation chunk = whole;
    chunk.numel = std::min(longest, whole.numel - begin);
    chunk.output = at_offset(whole.output, begin);
    chunk.input = {kMailbox, half * kHalfMailbox};
    if (data != nullptr)
      std::memcpy(regions_.address(chunk.input, rank()),
                  static_cast<const std::byte*>(data) + begin * element_bytes,
                  static_cast<size_t>(chunk.numel * element_bytes));
    last = mailbox_used_[half] = post(chunk, tag);
  }
  return last;
}

uint64_t OperationQueue::post(const Operation& operation, uint32_t tag) {
  check_alive();  // no operation with a rank that has given up, even if its input is there
  const uint64_t number = posted_ + 1;
  if (number > kMaxInFlight) await_all_done(number - kMaxInFlight);
  operations_[number % kMaxInFlight] = operation;
  counters_->write_key(number, {tag, operation.input.region, operation.input.offset});
  posted_ = number;
  counters_->set(Counter::kPosted, number);
  progress();
  return number;
}

// -------------------------------------------------------------------------------------- progress

bool OperationQueue::all_posted(uint64_t number) const {
  if (!counters_->all_at(Counter::kPosted, number)) return false;
  const OperationKey& mine = counters_->key(number, rank());
  for (int other = 0; other < size(); ++other)
    if (counters_->key(number, other) != mine)
      throw CommError("rank ", rank(), " and rank ", other, " issued different collectives");
  return true;
}

void OperationQueue::progress() {
  // After a failure the callers' buffers may be gone.
  if (counters_->has_left(rank())) throw CommError("rank ", rank(), " has left the group");
  while (reduced_ < posted_ && reduce_own_slice(reduced_ + 1)) counters_->set(Counter::kReduced, ++reduced_);
  while (done_ < reduced_ && complete(done_ + 1)) counters_->set(Counter::kDone, ++done_);
}

void OperationQueue::reduce_range(const Operation& operation, int64_t begin, int64_t numel,
                                  const ReduceOutput& output) const {
  std::vector<const void*> inputs;
  for (int other = 0; other < size(); ++other)
    inputs.push_back(regions_.address(operation.input, other) + begin * size_bytes(operation.dtype));
  reduce({.dtype = operation.dtype,
          .inputs = inputs.data(),
          .num_inputs = size(),
          .numel = numel,
          .output = output});
}

bool OperationQueue::reduce_own_slice(uint64_t number) {
  const Operation& operation = operations_[number % kMaxInFlight];
  if (operation.kind != Kind::kReduceScatter && operation.kind != Kind::kAllReduce) return true;
  if (!all_posted(number)) return false;
  if (operation.kind == Kind::kReduceScatter) {
    reduce_range(operation, rank() * operation.numel, operation.numel, operation.output);
  } else {
    const auto [begin, numel] = slice_of(operation.numel, rank(), size());
    reduce_range(operation, begin, numel, at_offset(operation.output, begin));
  }
  return true;
}

bool OperationQueue::complete(uint64_t number) {
  const Operation& operation = operations_[number % kMaxInFlight];
  auto* output = static_cast<std::byte*>(operation.output.data);
  switch (operation.kind) {
    case Kind::kReduceScatter: return true;
    case Kind::kBarrier: return all_posted(number);
    case Kind::kAllReduce:
      if (!counters_->all_at(Counter::kReduced, number)) return false;
      for (int other = 0; other < size(); ++other) {
        const auto [begin, numel] = slice_of(operation.numel, other, size());
        const int64_t element_bytes = size_bytes(operation.dtype), offset = begin * element_bytes;
        if (other != rank())
          copy_bytes(output + offset, regions_.address(operation.input, other) + offset,
                     numel * element_bytes);
      }
      return true;
    case Kind::kAllGather:
      if (!all_posted(number)) return false;
      for (int other = 0; other < size(); ++other)
        if (other != rank())
          copy_bytes(output + other * operation.output_stride,
                     regions_.address(operation.input, other) + other * operation.input_stride,
                     operation.numel);
      return true;
    case Kind::kBroadcast:
      if (!all_posted(number)) return false;
      if (rank() != operation.root)
        copy_bytes(output, regions_.address(operation.input, operation.root), operation.numel);
      return true;
    case Kind::kReduceFromMailbox:
      if (!all_posted(number)) return false;
      if (output != nullptr) reduce_range(operation, 0, operation.numel, operation.output);
      return true;
  }
  return true;
}

bool OperationQueue::is_finished(uint64_t number) const {
  if (done_ < number) return false;
  if (number + kMaxInFlight <= posted_) return true;  // a later operation has taken its place
  return !operations_[number % kMaxInFlight].buffer_is_input || counters_->all_at(Counter::kDone, number);
}

// ------------------------------------------------------------------------------------------ waiting

void OperationQueue::check_alive() const {
  for (int other = 0; other < size(); ++other)
    if (counters_->has_left(other))
      throw CommError(other == rank() ? str("rank ", other, " has left the group")
                                      : str("rank ", other, " left"));
}

bool OperationQueue::poll(uint64_t number) {
  progress();
  if (is_finished(number)) return true;
  check_alive();
  return false;
}

template <class Condition>
bool OperationQueue::wait_until(const Condition& condition, milliseconds limit) {
  for (int spin = 0; spin < num_spins_; ++spin) {
    if (condition()) return true;
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }
  const auto deadline = steady_clock::now() + limit;
  while (true) {
    const uint32_t seen = counters_->num_notifications();
    if (condition()) return true;
    check_alive();
    const auto now = steady_clock::now();
    if (now >= deadline) return false;
    counters_->sleep(seen, std::min<std::chrono::microseconds>(
                               kPollInterval, std::chrono::ceil<std::chrono::microseconds>(deadline - now)));
    if (steady_clock::now() < now + kPollInterval) continue;
    const auto gone = peers_->gone();
    if (gone && !condition()) throw RankIsGone(*gone);
  }
}

bool OperationQueue::wait(uint64_t number, milliseconds limit) {
  return wait_until([&] { return poll(number); }, limit);
}

void OperationQueue::await_all_done(uint64_t number) {
  const auto all_done = [&] {
    progress();
    return counters_->all_at(Counter::kDone, number);
  };
  if (number == 0) return;
  const auto deadline = steady_clock::now() + timeout_;
  while (!wait_until(all_done, std::min(kOwnWatchInterval, timeout_))) {
    if (steady_clock::now() >= deadline) throw CommError("timed out after ", name_duration(timeout_));
    watch_();
  }
}

void OperationQueue::abort() { counters_->leave(); }

}  // namespace tessera::comm::shm

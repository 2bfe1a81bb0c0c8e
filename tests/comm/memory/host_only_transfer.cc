#include "tests/comm/memory/host_only_transfer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <chrono>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "core/str.h"

namespace tessera::comm::testing {

class HostOnlyTransfer::HostEvent final : public Event {
 public:
  HostEvent(Direction direction, int64_t number) : direction(direction), number(number) {}
  const Direction direction;
  const int64_t number;  // of the copy, from 1
};

static std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

static bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const std::string_view first = bytes_of(a), second = bytes_of(b);
  return first.data() < second.data() + second.size() && second.data() < first.data() + first.size();
}

HostOnlyTransfer::HostOnlyTransfer(Mode mode) : mode_(mode) {
  if (mode_ != Mode::kOnThreads) return;
  for (const Direction direction : {Direction::kDown, Direction::kUp})
    threads_.emplace_back([this, direction] { run(direction); });
}

HostOnlyTransfer::~HostOnlyTransfer() {
  {
    const Lock lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

at::Tensor HostOnlyTransfer::host_memory(int64_t bytes) {
  constexpr int64_t kPage = 4096;
  if (refuses_memory_) throw Error("no room for ", bytes, " bytes");
  const at::Tensor memory = at::empty({bytes + kPage}, at::kByte);
  const int64_t past = reinterpret_cast<intptr_t>(memory.data_ptr()) % kPage;
  const at::Tensor aligned = memory.narrow(0, past == 0 ? 0 : kPage - past, bytes).zero_();
  *host_bytes_ += bytes;
  return at::from_blob(
      aligned.data_ptr(), {bytes}, [aligned, bytes, counter = host_bytes_](void*) { *counter -= bytes; },
      aligned.options());
}

EventPtr HostOnlyTransfer::d2h(const at::Tensor& host, const at::Tensor& device, const EventPtr& after) {
  return begin(Direction::kDown, host, device, after);
}

EventPtr HostOnlyTransfer::h2d(const at::Tensor& device, const at::Tensor& host, const EventPtr& after) {
  return begin(Direction::kUp, device, host, after);
}

EventPtr HostOnlyTransfer::begin(Direction direction, const at::Tensor& to, const at::Tensor& from,
                                 const EventPtr& after) {
  Lock lock(mutex_);
  if (to.nbytes() != from.nbytes() || to.scalar_type() != from.scalar_type())
    violations_.push_back(str("a copy of ", from.nbytes(), " bytes into ", to.nbytes()));
  check_free(direction, to, from, after);
  const bool up = direction == Direction::kUp;
  copies_.push_back({direction, static_cast<int64_t>(to.nbytes()), (up ? to : from).const_data_ptr(),
                     (up ? from : to).const_data_ptr()});
  if (fails_in_ >= 0 && fails_in_-- == 0) {
    failed_ = true;
    throw Error("the device has failed");
  }
  // What `after` still has to write is not there yet.
  const uint64_t digest = passed_now(after) ? std::hash<std::string_view>()(bytes_of(from)) : 0;
  stream(direction).pending.push_back({to, from, after, digest});
  auto event = std::make_shared<HostEvent>(direction, ++stream(direction).num_begun);
  if (mode_ == Mode::kAtOnce) carry_out_until(event, lock);
  changed_.notify_all();
  return event;
}

/// Copies of one direction keep their order; of the other one, what has not ended must be what `after` waits
/// for.
void HostOnlyTransfer::check_free(Direction direction, const at::Tensor& to, const at::Tensor& from,
                                  const EventPtr& after) {
  const Direction other = direction == Direction::kUp ? Direction::kDown : Direction::kUp;
  const auto* const waits_for = static_cast<const HostEvent*>(after.get());
  int64_t number = stream(other).num_ended;
  for (const Pending& pending : stream(other).pending) {
    ++number;
    if (waits_for != nullptr && waits_for->direction == other && waits_for->number >= number) continue;
    if ((pending.read.empty() && overlap(to, pending.from)) || overlap(to, pending.to) ||
        overlap(from, pending.to))
      violations_.push_back(str("a copy ", direction == Direction::kUp ? "up" : "down", " of ", to.nbytes(),
                                " bytes uses what copy ", number, " of the other direction still has"));
  }
}

bool HostOnlyTransfer::passed_now(const EventPtr& event) {
  const auto* const point = static_cast<const HostEvent*>(event.get());
  return point == nullptr || stream(point->direction).num_ended >= point->number;
}

void HostOnlyTransfer::carry_out_until(const EventPtr& event, Lock& lock) {
  const auto* const point = static_cast<const HostEvent*>(event.get());
  if (point == nullptr) return;
  if (mode_ == Mode::kOnThreads) {
    changed_.wait(lock, [&] { return passed_now(event); });
  } else {
    while (!passed_now(event)) carry_out_next(point->direction, lock);
  }
}

void HostOnlyTransfer::carry_out_next(Direction direction, Lock& lock) {
  Pending& copy = stream(direction).pending.front();
  carry_out_until(copy.after, lock);
  // Stays in the list, so that it is seen, until it has ended.
  const at::Tensor to = copy.to, from = copy.from;
  const std::vector<char> read = std::move(copy.read);
  if (read.empty()) check_unchanged(direction, copy);
  if (mode_ == Mode::kOnThreads) lock.unlock();
  std::memcpy(to.data_ptr(), read.empty() ? from.const_data_ptr() : read.data(), from.nbytes());
  if (mode_ == Mode::kOnThreads) lock.lock();
  stream(direction).pending.pop_front();
  ++stream(direction).num_ended;
  changed_.notify_all();
}

void HostOnlyTransfer::run(Direction direction) {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stops_ || !stream(direction).pending.empty(); });
    if (stops_) return;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock.lock();
    carry_out_next(direction, lock);
  }
}

EventPtr HostOnlyTransfer::issue_after(const EventPtr& event, c10::function_ref<void()> issue) {
  synchronize(event);
  issue();
  return event;
}

bool HostOnlyTransfer::query(const EventPtr& event) {
  const Lock lock(mutex_);
  return passed_now(event);
}

void HostOnlyTransfer::synchronize(const EventPtr& event) {
  Lock lock(mutex_);
  if (failed_) throw Error("the device has failed");
  carry_out_until(event, lock);
}

/// What the device does next may write to what a copy to the host has read. The host has the copy no sooner
/// than it has waited for it.
void HostOnlyTransfer::wait(const EventPtr& event) {
  const auto* const point = static_cast<const HostEvent*>(event.get());
  if (point == nullptr || mode_ != Mode::kLast || point->direction == Direction::kUp)
    return synchronize(event);
  Lock lock(mutex_);
  if (failed_) throw Error("the device has failed");
  read_until(*point, lock);
}

void HostOnlyTransfer::read_until(const HostEvent& event, Lock& lock) {
  const auto pending = [&](int64_t number) -> Pending* {
    const int64_t ended = down_.num_ended;
    return number > ended ? &down_.pending[static_cast<size_t>(number - ended - 1)] : nullptr;
  };
  for (int64_t number = 1; number <= event.number; ++number) {
    if (Pending* const copy = pending(number)) carry_out_until(EventPtr(copy->after), lock);
    Pending* const copy = pending(number);  // unless it was carried out for that
    if (copy == nullptr || !copy->read.empty()) continue;
    check_unchanged(Direction::kDown, *copy);
    const std::string_view from = bytes_of(copy->from);
    copy->read.assign(from.begin(), from.end());
  }
}

void HostOnlyTransfer::check_unchanged(Direction direction, const Pending& copy) {
  if (copy.digest != 0 && copy.digest != std::hash<std::string_view>()(bytes_of(copy.from)))
    violations_.push_back(str("what a copy ", direction == Direction::kUp ? "up" : "down", " of ",
                              copy.to.nbytes(), " bytes reads was changed before it had ended"));
}

void HostOnlyTransfer::synchronize() {
  Lock lock(mutex_);
  for (const Direction direction : {Direction::kDown, Direction::kUp})
    carry_out_until(std::make_shared<HostEvent>(direction, stream(direction).num_begun), lock);
}

std::vector<HostOnlyTransfer::Copy> HostOnlyTransfer::copies() const {
  const Lock lock(mutex_);
  return copies_;
}

void HostOnlyTransfer::forget_copies() {
  const Lock lock(mutex_);
  copies_.clear();
}

int64_t HostOnlyTransfer::bytes(Direction direction) const {
  int64_t sum = 0;
  for (const Copy& copy : copies())
    if (copy.direction == direction) sum += copy.bytes;
  return sum;
}

std::vector<std::string> HostOnlyTransfer::violations() const {
  const Lock lock(mutex_);
  return violations_;
}

void HostOnlyTransfer::fail_at(int copy) {
  const Lock lock(mutex_);
  fails_in_ = copy;
}

}  // namespace tessera::comm::testing

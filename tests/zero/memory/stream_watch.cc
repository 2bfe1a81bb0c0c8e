#include "tests/zero/memory/stream_watch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/str.h"

namespace tessera::zero::testing {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr const char* kCompute = "compute";

thread_local std::string current = kCompute;
thread_local StreamWatch* watching = nullptr;

/// The memory of a tensor, also where it must not be asked for.
std::pair<uintptr_t, uintptr_t> range_of(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) return {0, 0};
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto data = reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
  if (data == 0) return {0, 0};
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  return {data + static_cast<uintptr_t>(tensor.storage_offset() * itemsize),
          data + static_cast<uintptr_t>((last + 1) * itemsize)};
}

/// Shapes and types are all that these read.
bool reads_no_elements(std::string_view name) {
  for (const std::string_view part : {"empty", "_like", "new_zeros", "new_full", "result_type",
                                      "record_stream", "is_same_size", "set_data"})
    if (name.find(part) != std::string_view::npos) return true;
  return false;
}

/// A view aliases its argument and reads nothing of it; what an operator may copy is seen where it calls one
/// that copies.
void note_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto note = [&](const at::Tensor& tensor, bool writes) {
    if (tensor.defined())
      watching->note(current, tensor, writes ? StreamWatch::Access::kWrite : StreamWatch::Access::kRead,
                     schema.name());
  };
  if (watching != nullptr && !reads_no_elements(schema.name())) {
    const auto arguments = torch::jit::last(*stack, schema.arguments().size());
    for (const bool writes : {false, true})
      for (size_t i = 0; i < arguments.size(); ++i) {
        const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
        if (alias == nullptr ? writes : !writes || !alias->isWrite()) continue;
        if (arguments[i].isTensor()) note(arguments[i].toTensor(), writes);
        if (!arguments[i].isTensorList()) continue;
        for (const at::Tensor& tensor : arguments[i].toTensorVector()) note(tensor, writes);
      }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  // The allocator gives what has been freed to the next request on its stream, where earlier work may still
  // use it: so memory that is new is ordered behind this stream alone.
  if (watching != nullptr && schema.name() == "aten::empty" && stack->back().isTensor())
    note(stack->back().toTensor(), /*writes=*/true);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&note_operator>());
}

/// What moves the bytes is no part of the device.
template <class Function>
auto unwatched(const Function& function) {
  const c10::impl::ExcludeDispatchKeyGuard not_heard(kKey);
  return function();
}

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) clock[stream] = std::max(clock[stream], number);
}

std::string name_of(StreamWatch::Access access) {
  return access == StreamWatch::Access::kRead ? "reads" : "writes";
}

}  // namespace

// ------------------------------------------------------------------------------------------- StreamWatch

std::string StreamWatch::current_stream() { return current; }

void StreamWatch::note(const std::string& stream, const at::Tensor& tensor, Access access,
                       const std::string& who) {
  const auto [begin, end] = range_of(tensor);
  if (begin == end) return;
  const std::lock_guard lock(mutex_);
  Clock& clock = streams_[stream];
  join(clock, host_);
  for (const auto& [range, last] : accesses_) {
    if (range.begin >= end || begin >= range.end || range.stream == stream) continue;
    if (range.access == Access::kRead && access == Access::kRead) continue;
    if (clock[range.stream] >= last.number) continue;
    violations_.insert(str(last.who, " ", name_of(range.access), " on ", range.stream, ", ", who, " ",
                           name_of(access), " on ", stream));
  }
  ++num_noted_;
  accesses_[{stream, access, begin, end}] = {++clock[stream], who};
}

Clock StreamWatch::event(const std::string& stream) {
  const std::lock_guard lock(mutex_);
  Clock clock = streams_[stream];
  join(clock, host_);
  return clock;
}

void StreamWatch::block(const std::string& stream, const Clock& event, Edge edge) {
  const std::lock_guard lock(mutex_);
  if (edge != dropped_) join(streams_[stream], event);
}

void StreamWatch::synchronize(const Clock& event) {
  const std::lock_guard lock(mutex_);
  join(host_, event);
}

std::set<std::string> StreamWatch::violations() const {
  const std::lock_guard lock(mutex_);
  return violations_;
}

int64_t StreamWatch::num_noted() const {
  const std::lock_guard lock(mutex_);
  return num_noted_;
}

StreamScope::StreamScope(std::string name) : outer_(std::exchange(current, std::move(name))) {}
StreamScope::~StreamScope() { current = outer_; }

WatchOperators::WatchOperators(StreamWatch& watch) {
  watching = &watch;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

WatchOperators::~WatchOperators() {
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  watching = nullptr;
}

// ---------------------------------------------------------------------------------- StreamedCommunicator

class StreamedCommunicator::StreamedWork final : public comm::Work {
 public:
  StreamedWork(const StreamedCommunicator& owner, comm::WorkPtr inner, std::function<void()> finish)
      : watch_(owner.watch_),
        done_(owner.done_),
        end_(watch_->event(owner.stream_)),
        inner_(std::move(inner)),
        finish_(std::move(finish)) {}
  bool test() override { return done_; }
  void wait() override {
    unwatched([&] { inner_->wait(); });
    watch_->block(current, end_, StreamWatch::Edge::kWait);
    if (finish_) std::exchange(finish_, nullptr)();
  }

 private:
  const std::shared_ptr<StreamWatch> watch_;
  const bool done_;
  const Clock end_;
  const comm::WorkPtr inner_;
  std::function<void()> finish_;
};

/// Who the collective's accesses are by.
std::string StreamedCommunicator::begin(const char* operation, std::string_view label) {
  watch_->block(stream_, watch_->event(current), StreamWatch::Edge::kIssue);
  return str(operation, " of ", label);
}

comm::WorkPtr StreamedCommunicator::work(comm::WorkPtr inner, std::function<void()> finish) {
  return std::make_shared<StreamedWork>(*this, std::move(inner), std::move(finish));
}

comm::WorkPtr StreamedCommunicator::do_all_gather(const at::Tensor& full, const at::Tensor& shard,
                                                  std::string_view label) {
  const std::string who = begin("all-gather", label);
  watch_->note(stream_, shard, StreamWatch::Access::kRead, who);
  watch_->note(stream_, full, StreamWatch::Access::kWrite, who);
  return work(unwatched([&] { return ForwardingCommunicator::do_all_gather(full, shard, label); }));
}

// The sum is made in place, and write_result() takes it from there on the stream that waits
// (finish_reduction() in comm/c10d_pending.cc).
comm::WorkPtr StreamedCommunicator::do_reduce_scatter(const at::Tensor& full, const comm::ReduceInto& into,
                                                      std::string_view label) {
  const std::string who = begin("reduce-scatter", label);
  watch_->note(stream_, full, StreamWatch::Access::kWrite, who);
  const int64_t numel = full.numel() / size();
  const at::Tensor sum = full.narrow(0, rank() * numel, numel);
  return work(unwatched([&] { return ForwardingCommunicator::do_reduce_scatter(full, into, label); }),
              [watch = watch_, sum, shard = into.shard, who] {
                watch->note(current, sum, StreamWatch::Access::kRead, "the result of the " + who);
                watch->note(current, shard, StreamWatch::Access::kWrite, "the result of the " + who);
              });
}

comm::WorkPtr StreamedCommunicator::do_all_reduce(const at::Tensor& full, double scale,
                                                  std::string_view label) {
  const std::string who = begin("all-reduce", label);
  watch_->note(stream_, full, StreamWatch::Access::kWrite, who);
  return work(unwatched([&] { return ForwardingCommunicator::do_all_reduce(full, scale, label); }),
              [watch = watch_, full, scale, who] {
                if (scale != 1)
                  watch->note(current, full, StreamWatch::Access::kWrite, "the result of the " + who);
              });
}

comm::WorkPtr StreamedCommunicator::do_broadcast(const at::Tensor& buffer, int root, std::string_view label) {
  const std::string who = begin("broadcast", label);
  watch_->note(stream_, buffer, StreamWatch::Access::kWrite, who);
  return work(unwatched([&] { return ForwardingCommunicator::do_broadcast(buffer, root, label); }));
}

at::Tensor StreamedCommunicator::allocate_symmetric(int64_t bytes, at::Device device, std::string_view) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

comm::CommunicatorPtr StreamedCommunicator::duplicate(std::string_view name) {
  return std::make_shared<StreamedCommunicator>(ForwardingCommunicator::duplicate(name), watch_, done_,
                                                str(stream_, " ", name));
}

comm::CommunicatorPtr StreamedCommunicator::split(const std::vector<int>& ranks, std::string_view name) {
  return std::make_shared<StreamedCommunicator>(ForwardingCommunicator::split(ranks, name), watch_, done_,
                                                str(stream_, " ", name));
}

// ------------------------------------------------------------------------------------------ StreamedTransfer

class StreamedTransfer::ClockEvent final : public comm::Event {
 public:
  explicit ClockEvent(Clock clock) : clock(std::move(clock)) {}
  static Clock of(const comm::EventPtr& event) {
    return event ? static_cast<const ClockEvent&>(*event).clock : Clock{};
  }
  const Clock clock;
};

at::Tensor StreamedTransfer::host_memory(int64_t bytes) {
  return unwatched([&] { return inner_.host_memory(bytes); });
}

comm::EventPtr StreamedTransfer::record() { return std::make_shared<ClockEvent>(watch_->event(current)); }

comm::EventPtr StreamedTransfer::copy(const char* stream, const at::Tensor& to, const at::Tensor& from,
                                      const comm::EventPtr& after) {
  const std::string who = str("a copy of ", to.nbytes(), " bytes");
  watch_->block(stream, ClockEvent::of(after), StreamWatch::Edge::kAfter);
  watch_->note(stream, from, StreamWatch::Access::kRead, who);
  watch_->note(stream, to, StreamWatch::Access::kWrite, who);
  return std::make_shared<ClockEvent>(watch_->event(stream));
}

comm::EventPtr StreamedTransfer::d2h(const at::Tensor& host, const at::Tensor& device,
                                     const comm::EventPtr& after) {
  inner_.d2h(host, device, nullptr);
  return copy("down", host, device, after);
}

comm::EventPtr StreamedTransfer::h2d(const at::Tensor& device, const at::Tensor& host,
                                     const comm::EventPtr& after) {
  inner_.h2d(device, host, nullptr);
  return copy("up", device, host, after);
}

void StreamedTransfer::wait(const comm::EventPtr& event) {
  watch_->block(current, ClockEvent::of(event), StreamWatch::Edge::kFollow);
}

comm::EventPtr StreamedTransfer::issue_after(const comm::EventPtr& event, c10::function_ref<void()> issue) {
  constexpr const char* kBehind = "behind";
  watch_->block(kBehind, watch_->event(current), StreamWatch::Edge::kIssue);
  watch_->block(kBehind, ClockEvent::of(event), StreamWatch::Edge::kAfter);
  const StreamScope scope(kBehind);
  issue();
  return std::make_shared<ClockEvent>(watch_->event(kBehind));
}

void StreamedTransfer::synchronize(const comm::EventPtr& event) {
  watch_->synchronize(ClockEvent::of(event));
}

void StreamedTransfer::synchronize() {
  for (const char* const stream : {"down", "up", "behind"}) watch_->synchronize(watch_->event(stream));
}

}  // namespace tessera::zero::testing

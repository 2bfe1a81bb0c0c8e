#include "comm/memory/cuda_host_transfer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <mutex>

#include "comm/memory/cuda_pinning_abi.h"
#include "core/cuda_plugin.h"
#include "core/error.h"

namespace tessera::comm {
namespace {

constexpr int64_t kPinnedPage = 4096;

/// An event that is recorded once, before another thread can see it. From then on it is only read:
/// cudaStreamWaitEvent and cudaEventSynchronize take what was captured when it was recorded.
class CudaEvent final : public Event {
 public:
  explicit CudaEvent(const c10::Stream& stream) : event_(stream.device_type()) { event_.record(stream); }
  const c10::Event& event() const { return event_; }

 private:
  c10::Event event_;
};

const c10::Event& event_of(const EventPtr& event) { return static_cast<const CudaEvent&>(*event).event(); }

class CudaHostTransfer final : public HostTransfer {
 public:
  CudaHostTransfer(at::Device device, bool pin_memory)
      : device_(device),
        pin_memory_(pin_memory),
        guard_(device.type()),
        down_(guard_.getStreamFromGlobalPool(device)),
        up_(guard_.getStreamFromGlobalPool(device)),
        behind_(guard_.getStreamFromGlobalPool(device)) {}

  /// Page-locked by registration: libtorch's own pinned memory comes in sizes that are powers of two. The
  /// registered range is of whole pages that nothing else has, because no page may be registered twice.
  at::Tensor host_memory(int64_t bytes) override {
    const int64_t pages = (bytes + kPinnedPage - 1) / kPinnedPage * kPinnedPage;
    const at::Tensor memory = at::empty({pages + kPinnedPage - 1}, at::kByte);
    const int64_t past = reinterpret_cast<intptr_t>(memory.data_ptr()) % kPinnedPage;
    at::Tensor aligned = memory.narrow(0, past == 0 ? 0 : kPinnedPage - past, pages).zero_();
    if (pin_memory_ && pages > 0) aligned = pinned(aligned);
    return aligned.narrow(0, 0, bytes);
  }

  int64_t pinned_bytes() const override { return *pinned_bytes_; }

  EventPtr record() override { return std::make_shared<CudaEvent>(guard_.getStream(device_)); }

  EventPtr d2h(const at::Tensor& host, const at::Tensor& device, const EventPtr& after) override {
    return copy(host, device, down_, after);
  }
  EventPtr h2d(const at::Tensor& device, const at::Tensor& host, const EventPtr& after) override {
    return copy(device, host, up_, after);
  }

  void wait(const EventPtr& event) override {
    if (event) event_of(event).block(guard_.getStream(device_));
  }

  // Collectives wait for the stream that is current when they are issued ([Note: streams] in
  // comm/nccl/nccl.cc): one that waits for both, so that neither the device's work nor later copies wait for
  // the event.
  EventPtr issue_after(const EventPtr& event, c10::function_ref<void()> issue) override {
    event_of(record()).block(behind_);
    if (event) event_of(event).block(behind_);
    const c10::StreamGuard on_stream(behind_);
    issue();
    return std::make_shared<CudaEvent>(behind_);
  }

  bool query(const EventPtr& event) override { return !event || event_of(event).query(); }
  void synchronize(const EventPtr& event) override {
    if (event) event_of(event).synchronize();
  }
  void synchronize() override {
    guard_.synchronizeStream(down_);
    guard_.synchronizeStream(up_);
    guard_.synchronizeStream(behind_);
  }

 private:
  using Pinned = std::shared_ptr<std::atomic<int64_t>>;

  at::Tensor pinned(const at::Tensor& memory) {
    static const auto pin = TESSERA_RESOLVE(tessera_cuda_pin);
    static const auto unpin = TESSERA_RESOLVE(tessera_cuda_unpin);
    const auto bytes = static_cast<int64_t>(memory.nbytes());
    const c10::DeviceGuard on_device(device_);
    if (const char* error = pin(memory.data_ptr(), bytes))
      throw Error("cannot page-lock ", bytes, " bytes of host memory (", error, "); ", *pinned_bytes_,
                  " bytes are: expected more memory that may be locked, or, for offloaded state, "
                  "zero_optimization.offload_optimizer.pin_memory = false");
    *pinned_bytes_ += bytes;
    return at::from_blob(
        memory.data_ptr(), {bytes},
        [memory, bytes, counter = pinned_bytes_](void* data) {
          unpin(data);
          *counter -= bytes;
        },
        memory.options());
  }

  /// The copies of a direction are given to its stream in the order of the calls.
  EventPtr copy(const at::Tensor& to, const at::Tensor& from, const c10::Stream& stream,
                const EventPtr& after) {
    const at::DisableRecordFunctionGuard our_own_operators;
    const c10::InferenceMode without_autograd;  // a tensor that was made in this mode is written in it alone
    const std::lock_guard lock(mutex_);
    if (after) event_of(after).block(stream);
    const c10::StreamGuard on_copies(stream);
    at::Tensor(to).copy_(from, /*non_blocking=*/true);
    return std::make_shared<CudaEvent>(stream);
  }

  const at::Device device_;
  const bool pin_memory_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream down_, up_;
  const c10::Stream behind_;  // what issue_after() issues
  std::mutex mutex_;          // from the wait for `after` to the copy: nothing comes between
  const Pinned pinned_bytes_ =
      std::make_shared<std::atomic<int64_t>>(0);  // outlives the transfer with its memory
};

}  // namespace

std::shared_ptr<HostTransfer> make_cuda_host_transfer(at::Device device, bool pin_memory) {
  return std::make_shared<CudaHostTransfer>(device, pin_memory);
}

}  // namespace tessera::comm

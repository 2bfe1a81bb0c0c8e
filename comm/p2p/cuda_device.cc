#include "comm/p2p/cuda_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fcntl.h>

#include <cstring>
#include <utility>

#include "comm/p2p/cuda_abi.h"
#include "comm/shm/shared_memory.h"
#include "core/check.h"
#include "core/cuda_plugin.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm::p2p {
namespace {

/// decltype only: the function is found at run time, never linked.
#define TESSERA_PLUGIN(name) \
  static const auto name##_found = reinterpret_cast<decltype(&(name))>(cuda_plugin_symbol(#name))

void check(const char* error, const char* what) {
  if (error != nullptr) throw CommError(str("CUDA: ", what, " failed: ", error));
}

void* current_stream(int device) {
  return c10::impl::VirtualGuardImpl(at::kCUDA)
      .getStream(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)))
      .native_handle();
}

class CudaEvent {
 public:
  explicit CudaEvent(int device) : device_(device) {
    TESSERA_PLUGIN(tessera_p2p_make_event);
    check(tessera_p2p_make_event_found(device, &event_), "making an event");
  }
  ~CudaEvent() {
    TESSERA_PLUGIN(tessera_p2p_destroy_event);
    tessera_p2p_destroy_event_found(device_, event_);
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(void* stream) {
    TESSERA_PLUGIN(tessera_p2p_record);
    check(tessera_p2p_record_found(device_, event_, stream), "recording an event");
  }
  void block(void* stream) const {
    TESSERA_PLUGIN(tessera_p2p_stream_wait_event);
    check(tessera_p2p_stream_wait_event_found(device_, stream, event_), "waiting for an event");
  }
  bool passed() const {
    TESSERA_PLUGIN(tessera_p2p_event_passed);
    int passed = 0;
    check(tessera_p2p_event_passed_found(device_, event_, &passed), "a collective");
    return passed != 0;
  }
  int device() const { return device_; }

 private:
  const int device_;
  void* event_ = nullptr;
};

/// An event that is recorded once, before another thread can see it.
class CudaMoment final : public Moment {
 public:
  CudaMoment(int device, void* stream) : event_(device) { event_.record(stream); }
  bool passed() override { return event_.passed(); }
  bool order_current(std::chrono::milliseconds) override {
    event_.block(current_stream(event_.device()));
    return true;
  }

 private:
  CudaEvent event_;
};

class CudaStream final : public Stream {
 public:
  explicit CudaStream(int device) : device_(device), followed_(device) {
    TESSERA_PLUGIN(tessera_p2p_make_stream);
    check(tessera_p2p_make_stream_found(device, &stream_), "making a stream");
  }
  ~CudaStream() override {
    TESSERA_PLUGIN(tessera_p2p_destroy_stream);
    tessera_p2p_destroy_stream_found(device_, stream_);
  }

  /// The stream keeps what the event held when it was given; the event can be recorded again.
  void follow_current() override {
    followed_.record(current_stream(device_));
    followed_.block(stream_);
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    TESSERA_PLUGIN(tessera_p2p_copy);
    check(tessera_p2p_copy_found(device_, stream_, to, from, bytes), "a copy");
  }
  void reduce(const shm::Reduction& given) override {
    TESSERA_PLUGIN(tessera_p2p_reduce);
    TESSERA_CHECK(given.num_inputs <= kMaxRanks, given.num_inputs, " inputs");
    CudaReduction reduction{};
    std::memcpy(reduction.inputs, given.inputs, static_cast<size_t>(given.num_inputs) * sizeof(void*));
    reduction.num_inputs = given.num_inputs;
    reduction.dtype = given.dtype;
    reduction.numel = given.numel;
    reduction.output = given.output.data;
    reduction.output_dtype = given.output.dtype;
    reduction.scale = given.output.scale;
    reduction.add = given.output.add;
    check(tessera_p2p_reduce_found(device_, stream_, &reduction), "a sum");
  }
  void write(Flag& flag, uint64_t number, bool with_upper) override {
    write32(flag.low, static_cast<uint32_t>(number));
    if (with_upper) write32(flag.high, static_cast<uint32_t>(number >> 32));
  }
  void wait(const Flag& flag, uint64_t number) override {
    TESSERA_PLUGIN(tessera_p2p_wait64);
    check(tessera_p2p_wait64_found(device_, stream_, &flag, number), "waiting for a flag");
  }
  MomentPtr now() override { return std::make_shared<CudaMoment>(device_, stream_); }
  bool idle() override {
    TESSERA_PLUGIN(tessera_p2p_stream_idle);
    int idle = 0;
    check(tessera_p2p_stream_idle_found(device_, stream_, &idle), "a collective");
    return idle != 0;
  }

 private:
  void write32(std::atomic<uint32_t>& word, uint32_t value) {
    TESSERA_PLUGIN(tessera_p2p_write32);
    check(tessera_p2p_write32_found(device_, stream_, &word, value), "writing a flag");
  }

  const int device_;
  CudaEvent followed_;
  void* stream_ = nullptr;
};

class CudaMemory final : public Memory {
 public:
  CudaMemory(int device, const CudaMapping& mapping) : device_(device), mapping_(mapping) {}
  ~CudaMemory() override {
    TESSERA_PLUGIN(tessera_p2p_free);
    tessera_p2p_free_found(device_, &mapping_);
  }
  std::byte* data() const override { return static_cast<std::byte*>(mapping_.data); }
  const CudaMapping& mapping() const { return mapping_; }

 private:
  const int device_;
  const CudaMapping mapping_;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index) : index_(index) {}

  at::Device place() const override { return {at::kCUDA, static_cast<c10::DeviceIndex>(index_)}; }
  int64_t half_mailbox_bytes() const override { return int64_t{16} << 20; }

  std::shared_ptr<Memory> allocate(int64_t bytes) override {
    TESSERA_PLUGIN(tessera_p2p_allocate);
    CudaMapping mapping;
    if (const char* const error = tessera_p2p_allocate_found(index_, bytes, &mapping))
      throw CommError(
          str("no ", shm::mebibytes(bytes), " MiB of memory of cuda:", index_, " for all ranks: ", error));
    return std::make_shared<CudaMemory>(index_, mapping);
  }
  FileDescriptor share(Memory& memory) override {
    TESSERA_PLUGIN(tessera_p2p_share);
    int fd = -1;
    check(tessera_p2p_share_found(index_, &static_cast<CudaMemory&>(memory).mapping(), &fd),
          "exporting memory");
    FileDescriptor shared(fd);
    fcntl(fd, F_SETFD, FD_CLOEXEC);  // a program that this one starts must not keep the memory
    return shared;
  }
  std::shared_ptr<Memory> adopt(FileDescriptor fd, int64_t bytes) override {
    TESSERA_PLUGIN(tessera_p2p_adopt);
    CudaMapping mapping;
    check(tessera_p2p_adopt_found(index_, fd.get(), bytes, &mapping), "mapping another rank's memory");
    return std::make_shared<CudaMemory>(index_, mapping);
  }
  std::shared_ptr<void> register_flags(std::byte* data, int64_t bytes) override {
    TESSERA_PLUGIN(tessera_p2p_register);
    TESSERA_PLUGIN(tessera_p2p_unregister);
    check(tessera_p2p_register_found(index_, data, bytes), "page-locking flags");
    return {data, [index = index_](void* registered) { tessera_p2p_unregister_found(index, registered); }};
  }
  std::unique_ptr<Stream> make_stream() override { return std::make_unique<CudaStream>(index_); }

 private:
  const int index_;
};

}  // namespace

std::shared_ptr<Device> make_cuda_device(int index) { return std::make_shared<CudaDevice>(index); }

std::string cuda_uuid(int index) {
  TESSERA_PLUGIN(tessera_p2p_uuid);
  CudaUuid uuid;
  check(tessera_p2p_uuid_found(index, &uuid), "asking for the device's identity");
  return {reinterpret_cast<const char*>(uuid.bytes), sizeof uuid.bytes};
}

std::string obstacle_on_cuda(int index, const std::vector<std::string>& uuids) {
  TESSERA_PLUGIN(tessera_p2p_check);
  TESSERA_PLUGIN(tessera_p2p_can_access);
  if (const char* const lacks = tessera_p2p_check_found(index)) return str("cuda:", index, ": ", lacks);
  for (size_t rank = 0; rank < uuids.size(); ++rank) {
    CudaUuid uuid;
    TESSERA_CHECK(uuids[rank].size() == sizeof uuid.bytes, uuids[rank].size(),
                  " bytes of a device's identity");
    std::memcpy(uuid.bytes, uuids[rank].data(), sizeof uuid.bytes);
    int can = 0;
    check(tessera_p2p_can_access_found(index, &uuid, &can), "asking for access to another device");
    if (can == 0)
      return str("cuda:", index, " cannot access the memory of rank ", rank, "'s device (no peer access)");
  }
  return "";
}

}  // namespace tessera::comm::p2p

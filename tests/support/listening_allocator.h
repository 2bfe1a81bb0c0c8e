// ListeningAllocator: libtorch's allocator of CPU tensors, which tells a listener of every block.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <cstdint>

namespace tessera::testing {

/// Listener has `static void took(void* data, int64_t bytes)` and `static void gives_back(void* data)`, which
/// are called on the thread that allocates or frees. It may have `static void wants(int64_t bytes)`, which is
/// called before, and which may throw.
template <class Listener>
class ListeningAllocator final : public c10::Allocator {
 public:
  /// The first call installs it; it is never removed, since tensors may outlive whoever installed it.
  static void install() { instance(); }

  c10::DataPtr allocate(size_t bytes) override {
    if constexpr (requires { Listener::wants(0); }) Listener::wants(static_cast<int64_t>(bytes));
    void* const data = inner_->raw_allocate(bytes);
    if (data != nullptr) Listener::took(data, static_cast<int64_t>(bytes));
    return {data, data, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

 private:
  static ListeningAllocator& instance() {
    static ListeningAllocator& allocator = *new ListeningAllocator;
    static const bool installed = (c10::SetCPUAllocator(&allocator, /*priority=*/100), true);
    (void)installed;
    return allocator;
  }
  static void free(void* data) {
    if (data != nullptr) Listener::gives_back(data);
    instance().inner_->raw_deleter()(data);
  }
  c10::Allocator* inner_ = c10::GetCPUAllocator();
};

}  // namespace tessera::testing

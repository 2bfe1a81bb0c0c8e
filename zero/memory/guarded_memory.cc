#include "zero/memory/guarded_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "core/error.h"

namespace tessera::zero {
namespace {

// A signal handler can reach nothing but process-wide data, so this table is the one mutable global of the
// project: fixed size, atomics only, read by the handler without locks. Regions beyond it stay
// guarded, but their faults have no message.
struct Region {
  std::atomic<uintptr_t> begin{0};  // 0: free
  std::atomic<uintptr_t> end{0};
  char message[512];
};
constexpr int kMaxRegions = 16384;
std::array<Region, kMaxRegions> regions;
struct sigaction previous_action;

void on_fault(int signal, siginfo_t* info, void*) {
  sigaction(signal, &previous_action, nullptr);
  // A signal that a process has sent (kill, sigqueue, tgkill) does not come again by itself, as that of an
  // instruction does. It is blocked here, and so delivered when this handler returns.
  if (info->si_code <= 0) {
    raise(signal);
    return;
  }
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (const Region& region : regions) {
    const uintptr_t begin = region.begin.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= region.end.load(std::memory_order_acquire)) continue;
    [[maybe_unused]] ssize_t written =
        write(STDERR_FILENO, region.message, strnlen(region.message, sizeof region.message));
    break;
  }
  // Returning to the faulting instruction raises the signal again, now for the handler before ours.
}

void install_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous_action);
  });
}

int claim_entry(uintptr_t begin, size_t bytes, const std::string& message) {
  for (int i = 0; i < kMaxRegions; ++i) {
    uintptr_t expected = 0;
    // 1 claims the entry without matching any address (end is 0) until it is filled.
    if (!regions[i].begin.compare_exchange_strong(expected, 1)) continue;
    const std::string line = message.substr(0, sizeof(Region::message) - 2) + "\n";
    std::memcpy(regions[i].message, line.c_str(), line.size() + 1);
    regions[i].end.store(begin + bytes, std::memory_order_release);
    regions[i].begin.store(begin, std::memory_order_release);
    return i;
  }
  return -1;
}

}  // namespace

GuardedMemory::GuardedMemory(size_t bytes, const std::string& message) : bytes_(bytes == 0 ? 1 : bytes) {
  install_handler();
  data_ = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED)
    throw Error("cannot reserve ", bytes_,
                " bytes of address space for a released unit: ", std::strerror(errno));
  entry_ = claim_entry(reinterpret_cast<uintptr_t>(data_), bytes_, message);
}

GuardedMemory::~GuardedMemory() {
  if (entry_ >= 0) {
    regions[entry_].end.store(0, std::memory_order_release);
    regions[entry_].begin.store(0, std::memory_order_release);
  }
  munmap(data_, bytes_);
}

}  // namespace tessera::zero

// Threads that get almost no time, so that what they do late shows.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <thread>

namespace tessera::testing {

/// This thread, and those that it makes, run on one core, the same for all who call this. `idle`: when no
/// other thread wants it.
inline void run_on_one_core(bool idle) {
  cpu_set_t cores, first;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(cores), &cores), 0);
  int core = 0;
  while (!CPU_ISSET(core, &cores)) ++core;
  CPU_ZERO(&first);
  CPU_SET(core, &first);
  ASSERT_EQ(::sched_setaffinity(0, sizeof(first), &first), 0);
  const sched_param none{};
  if (idle) {
    ASSERT_EQ(::sched_setscheduler(0, SCHED_IDLE, &none), 0);
  }
}

/// Keeps that core busy from begin() on.
class BusyCore {
 public:
  void begin() { change_to(State::kBusy); }
  ~BusyCore() {
    change_to(State::kEnds);
    thread_.join();
  }

 private:
  enum class State { kWaits, kBusy, kEnds };
  void change_to(State state) {
    state_ = state;
    state_.notify_all();
  }

  std::atomic<State> state_ = State::kWaits;
  std::thread thread_{[this] {
    run_on_one_core(/*idle=*/false);
    state_.wait(State::kWaits);
    while (state_ == State::kBusy) {
    }
  }};
};

}  // namespace tessera::testing

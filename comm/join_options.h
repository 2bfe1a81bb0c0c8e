// How a rank joins its group: which transport, on which device, and how long it waits.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "core/log.h"

namespace tessera::comm {

struct JoinOptions {
  /// The backend for CUDA tensors is "nccl" (a device for each rank) or "staged" (through the host's memory,
  /// over what "auto" is for CPU tensors; ranks may share a device). The backend for CPU tensors is "shm"
  /// (all ranks on one host), "hybrid" (shared memory within hosts, Gloo between them; on one host it is
  /// "shm") or "gloo". "auto" is the first of these that can be; for ranks as threads it is gloo.
  std::string backend = "auto";
  /// Says where the buffers will lie: "cpu"; "cuda": on the rank's device (cuda_choice.h); "auto": CUDA where
  /// this host has a device for each of its ranks (any, for "staged") and `backend` moves CUDA tensors, else
  /// the CPU.
  std::string device = "cpu";
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< of a collective; the same on all ranks
  /// Limits the time from the first attempt to connect until all ranks have met, for connecting, sending and
  /// receiving.
  std::chrono::milliseconds rendezvous_timeout = std::chrono::minutes(5);
  /// Applies to data that crosses the network (Gloo, hybrid): each rank compares a digest of what it has
  /// received with that of what was sent, and a difference is a CommError that names both. The same on all
  /// ranks.
  bool verify = false;
  /// Says what a rendezvous of more than 5 s waits for, and when "auto" has to do without shared memory.
  Logger log{};
  /// Called about every half second by a thread that waits for other ranks, at the rendezvous and in every
  /// collective. What it throws ends the wait: this rank leaves the group, and the call throws it. Python
  /// looks for Ctrl-C there.
  std::function<void()> interrupt = {};
  /// Called by a thread that posts a collective or waits for one; what it returns is destroyed afterwards.
  /// Python lets go of the GIL meanwhile [Note: the GIL and the backend's threads].
  std::function<std::shared_ptr<void>()> on_block = {};
};

}  // namespace tessera::comm

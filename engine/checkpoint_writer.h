// CheckpointWriter: writes what it is given now, or a copy of it on a thread of
// its own while training goes on.
//
// [Note: asynchronous saves]
// What a step changes is copied first, into one block of memory that is set aside and touched
// beforehand: that copy is all that training waits for. The thread then runs the same save()
// as always, over a communicator of its own, so that its exchanges cannot mix with the
// training's. One save is in flight at a time.
//
// [Note: a failure stays until all ranks take it] save() fails on all ranks alike, but their threads
// end at different times, so one rank may hear of it steps before another. report() therefore only
// logs. What the program acts upon comes from last_failed(), finish() and the next save(), which
// wait and so find the same on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/disk.h"
#include "core/log.h"
#include "engine/config/config.h"
#include "zero/model_view.h"
#include "zero/sharded_model.h"

namespace tessera {

/// A checkpoint's content as tensors, on any device.
struct CheckpointContent {
  std::string directory;
  std::string tag;
  std::vector<zero::NamedTensor> buffers;  ///< rank 0's are written
  std::vector<zero::NamedTensor> blobs;    ///< each rank's own, (n) uint8
  nlohmann::json state;
  decltype(DiskOptions::probe) probe =
      {};  ///< hears of every file operation; tests make disks slow and broken with it
};

/// Used by one thread.
class CheckpointWriter {
 public:
  /// Collective when `config.async`: makes the second group, and sets the memory aside.
  CheckpointWriter(zero::ShardedModel& model, int stage, const CheckpointConfig& config, Logger log);
  /// Waits for a save in flight; logs that it failed.
  ~CheckpointWriter();

  /// Collective. Saves, or copies and returns. A save in flight is waited for first; that it failed is
  /// logged, and then the past. Returns DIR/TAG. Throws this save's CheckpointError, on all ranks alike.
  std::string save(const CheckpointContent& content);
  /// Local. Logs a warning, once, when the last asynchronous save has ended in an
  /// error. Never waits, changes nothing else.
  void report();
  /// Collective as far as it waits. Whether the last asynchronous save has failed,
  /// which is logged then; equal on all ranks.
  bool last_failed();
  /// Collective as far as it waits. Throws what the last asynchronous save ended in,
  /// logged or not, on all ranks alike; once.
  void finish();
  /// Local (rank 0). Tags that checkpoint.keep_last neither counts nor deletes, from the next save on.
  void spare(std::vector<std::string> tags) { spare_ = std::move(tags); }
  /// Local. Memory set aside, bytes.
  int64_t snapshot_bytes() const {
    return snapshot_.defined() ? static_cast<int64_t>(snapshot_.nbytes()) : 0;
  }

 private:
  struct Job;  // tensors that are kept alive and the request that refers to them
  std::unique_ptr<Job> prepare(const CheckpointContent& content, bool copy);
  at::Tensor on_host(const at::Tensor& tensor, bool copy);
  int64_t bytes_to_copy() const;
  void write(const Job& job, comm::Communicator& comm) const;
  void log_failure(const std::exception_ptr& failure) const;

  zero::ShardedModel& model_;
  int stage_;
  CheckpointConfig config_;
  Logger log_;
  comm::CommunicatorPtr own_comm_;  // asynchronous
  at::Tensor snapshot_;             // (bytes) uint8
  int64_t snapshot_used_ = 0;
  std::vector<std::string> spare_;

  std::thread thread_;
  std::mutex mutex_;            // guards what follows
  std::exception_ptr failure_;  // of the last save, once it has ended
  bool logged_ = false;
};

}  // namespace tessera

// CheckpointWriter: writes a checkpoint before it returns, or a copy of it on its own thread while training
// continues.
//
// Tensors that a step changes are copied first, into one block of memory that is allocated and touched at the
// start: training waits for that copy only. Of a CUDA model that memory is page-locked, and the copies are
// given to the device: the host goes on at once, the device's next work comes after them, and the thread
// waits for each before it writes it. The thread then runs the same save() as a synchronous one, in a group
// of its own, which has exchanges alone, so that these cannot mix with the training's. One save is in flight
// at a time.
//
// State that lies on disk (zero_optimization.offload_optimizer, offload_param) is saved before save()
// returns: a copy to write from would have to be written, too.
//
// A checkpoint has a file for each rank. Rank r writes the file of the part that it owns
// (zero/plan/mesh.h), so every element is written once, also where several replicas hold it, and the files
// are those that a run without replicas would write. Each rank's own blobs go into the file of its number.
//
// A failure stays until all ranks take it: save() fails on all ranks alike, but their threads
// end at different times, so one rank may see it some steps before another. report() therefore only logs. The
// program acts on last_failed(), finish() and the next save(), which wait, and so see the same on all ranks.
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

#include "checkpoint/sharded/checkpoint_files.h"
#include "comm/communicator.h"
#include "comm/memory/host_transfer.h"
#include "core/files/disk.h"
#include "core/log.h"
#include "engine/checkpoint/host_folders.h"
#include "engine/config/config.h"
#include "zero/model/model_view.h"
#include "zero/sharded_model.h"

namespace tessera {

/// A checkpoint's content as tensors, on any device.
struct CheckpointContent {
  std::string directory;
  std::string tag;
  std::vector<zero::NamedTensor> buffers;  ///< rank 0's are written
  std::vector<zero::NamedTensor> blobs;    ///< each rank's own, (n) uint8
  nlohmann::json state;
  bool save_latest = true;
  bool exclude_frozen_parameters = false;
};

/// Saves checkpoints, in the background where that is asked for. Owns the memory for the copy, the thread
/// that writes it and the thread's communicator. At most one save is in flight. `model` must outlive it. Used
/// by one thread.
class CheckpointWriter {
 public:
  struct Where {
    /// Takes the place of one folder that all ranks share; must outlive the writer.
    HostFolders* folders = nullptr;
    /// Copies to the host, where its memory is not the model's, for `config.async`. Null: one is made.
    std::shared_ptr<comm::HostTransfer> transfer = nullptr;
  };
  /// Collective when `config.async`: makes the second group, and allocates the memory for the copy, which is
  /// page-locked where the model is on CUDA; where it cannot be, a warning says so.
  CheckpointWriter(zero::ShardedModel& model, int stage, const CheckpointConfig& config, Logger log,
                   Where where);
  /// Waits for a save in flight; logs that it failed.
  ~CheckpointWriter();

  /// Collective. Saves, or copies and returns. Waits for a save in flight first; if that failed, it is logged
  /// and does not affect this save. Returns DIR/TAG. Throws this save's CheckpointError, the same on all
  /// ranks.
  std::string save(const CheckpointContent& content);
  /// Logs a warning, once, when the last asynchronous save has ended in an error. Does not wait.
  void report();
  /// Collective as far as it waits. Whether the last asynchronous save has failed, which is then logged.
  /// Equal on all ranks.
  bool last_failed();
  /// Collective as far as it waits. Throws the last asynchronous save's error, logged or not, once and the
  /// same on all ranks.
  void finish();
  /// Sets the tags that checkpoint.keep_last neither counts nor deletes, from the next save on. Rank 0's
  /// count.
  void protect(std::vector<std::string> tags) { protected_tags_ = std::move(tags); }
  /// Bytes of the memory for the copy.
  int64_t snapshot_bytes() const {
    return snapshot_.defined() ? static_cast<int64_t>(snapshot_.nbytes()) : 0;
  }

  /// Returns what makes the copies; null: the host makes them, at once.
  const std::shared_ptr<comm::HostTransfer>& transfer() const { return transfer_; }

 private:
  struct Job;  // tensors that are kept alive and the request that refers to them
  bool in_background() const { return config_.async && model_.offload_store() == nullptr; }
  std::vector<at::Tensor> blobs_of_file(const CheckpointContent& content);
  std::unique_ptr<Job> prepare(const CheckpointContent& content, const std::vector<at::Tensor>& blobs,
                               bool copy);
  void allocate_snapshot();
  checkpoint::SourceBytes source_of(const at::Tensor& tensor, bool copy, Job& job);
  at::Tensor place_in_snapshot(const at::Tensor& tensor);
  at::Tensor blob_of_file(const zero::NamedTensor& blob, int file);
  int64_t bytes_to_copy() const;
  void write(const Job& job, comm::Communicator& comm) const;
  void wait_for_copies(const Job& job) const;
  void log_failure(const std::exception_ptr& failure) const;

  zero::ShardedModel& model_;
  int stage_;
  CheckpointConfig config_;
  Logger log_;
  HostFolders* folders_;
  std::shared_ptr<comm::HostTransfer> transfer_;  // null: copies are made at once
  comm::CommunicatorPtr own_comm_;                // asynchronous
  at::Tensor snapshot_;                           // (bytes) uint8
  int64_t snapshot_used_ = 0;
  std::vector<std::string> protected_tags_;
  std::vector<std::string> beside_latest_;  // tags saved without `latest`: keep_last does not delete them

  std::thread thread_;
  std::mutex mutex_;            // guards what follows
  std::exception_ptr failure_;  // of the last save, once it has ended
  bool logged_ = false;
};

}  // namespace tessera

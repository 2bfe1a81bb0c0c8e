#include "engine/checkpoint/checkpoint_writer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <span>
#include <system_error>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/sharded/catalog.h"
#include "checkpoint/sharded/save.h"
#include "comm/control/error_message.h"
#include "comm/init/agreement.h"
#include "comm/memory/cuda_host_transfer.h"
#include "comm/memory/host_thread.h"
#include "core/error.h"
#include "core/memory/memory_use.h"
#include "core/str.h"
#include "engine/checkpoint/checkpoint_types.h"
#include "engine/checkpoint/checkpoint_writer_internal.h"
#include "zero/memory/pause_listening.h"

namespace tessera {
struct CheckpointWriter::Job {
  std::vector<at::Tensor> tensors;
  comm::EventPtr copied;  // the last of the copies, which are made one after another
  checkpoint::SaveRequest request;
  std::vector<std::string> protect;
};

CheckpointWriter::CheckpointWriter(zero::ShardedModel& model, int stage, const CheckpointConfig& config,
                                   Logger log, Where where)
    : model_(model),
      stage_(stage),
      config_(config),
      log_(std::move(log)),
      folders_(where.folders),
      transfer_(std::move(where.transfer)) {
  if (config_.async && !in_background() && model_.comm().rank() == 0)
    log_.info("checkpoint.async: state on disk is saved before save_checkpoint() returns");
  if (!in_background()) return;
  own_comm_ = model_.comm().duplicate_for_exchange("checkpoint");
  allocate_snapshot();
}

void CheckpointWriter::allocate_snapshot() {
  const MemoryFor use(MemoryUse::kSnapshot);
  const at::Device device = model_.comm().device();
  try {
    if (!transfer_ && device.is_cuda())
      transfer_ = comm::make_cuda_host_transfer(device, /*pin_memory=*/true);
    if (transfer_) snapshot_ = transfer_->host_memory(bytes_to_copy());
  } catch (const std::exception& error) {
    log_.warning(str("checkpoint.async: training will wait for the copies of checkpoints: ",
                     comm::error_message(error)));
    transfer_ = nullptr;
  }
  if (!transfer_) snapshot_ = at::zeros({bytes_to_copy()}, at::kByte);
}

CheckpointWriter::~CheckpointWriter() {
  try {
    last_failed();
  } catch (const std::exception&) {
    // The log could not be written either.
  }
}

int64_t CheckpointWriter::bytes_to_copy() const {
  int64_t bytes = 0;
  for (int unit = 0; unit < model_.layout().num_units(); ++unit) {
    const zero::LocalState mine = model_.unit(unit).owned_state();
    bytes += static_cast<int64_t>(mine.weights.nbytes());
    for (const at::Tensor& state : mine.states) bytes += static_cast<int64_t>(state.nbytes());
  }
  return bytes;
}

/// Returns a place of the tensor's shape and type; undefined where the snapshot has no room.
at::Tensor CheckpointWriter::place_in_snapshot(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (snapshot_used_ + bytes > snapshot_bytes()) return {};
  const int64_t begin = std::exchange(snapshot_used_, snapshot_used_ + bytes);
  return snapshot_.narrow(0, begin, bytes).view(tensor.scalar_type()).view(tensor.sizes());
}

/// The tensor as contiguous memory of this host; `copy`: that later steps do not write to, in `place` where
/// that is defined.
static at::Tensor on_host(const at::Tensor& tensor, bool copy, at::Tensor place = {}) {
  if (!copy && tensor.is_cpu()) return tensor.contiguous();
  if (!place.defined()) place = at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
  return place.copy_(tensor);
}

/// Returns the bytes to write. If the device makes the copy, it is waited for when it is written.
checkpoint::SourceBytes CheckpointWriter::source_of(const at::Tensor& tensor, bool copy, Job& job) {
  at::Tensor place = copy ? place_in_snapshot(tensor) : at::Tensor();
  if (!place.defined() || !transfer_ || tensor.device() != model_.comm().device()) {
    job.tensors.push_back(on_host(tensor, copy, place));
    return std::span<const std::byte>(bytes_of(job.tensors.back()));
  }
  const at::Tensor source = tensor.contiguous();
  job.tensors.insert(job.tensors.end(), {source, place});
  job.copied = transfer_->d2h(place, source, transfer_->record());
  const std::span<const std::byte> bytes = bytes_of(place);
  return {static_cast<int64_t>(bytes.size()),
          [transfer = transfer_, copied = job.copied, bytes] {
            transfer->synchronize(copied);
            return bytes;
          },
          [] {}};
}

/// Read while it is written, one after another.
static checkpoint::SourceBytes bytes_on_disk(zero::OffloadedTensor& source, const at::Tensor& tensor) {
  return {static_cast<int64_t>(tensor.nbytes()),
          [&source, tensor] {
            source.acquire(zero::InMemory::Access::kRead);
            return std::span<const std::byte>(bytes_of(tensor));
          },
          [&source] { source.release(); }};
}

/// Collective where this rank does not write the file of its own number: then it gets the blobs that belong
/// there.
std::vector<at::Tensor> CheckpointWriter::blobs_of_file(const CheckpointContent& content) {
  const zero::PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> blobs;
  for (const zero::NamedTensor& blob : content.blobs)
    blobs.push_back(blob_of_file(blob, model_.mesh().owned_part()));
  return blobs;
}

at::Tensor CheckpointWriter::blob_of_file(const zero::NamedTensor& blob, int file) {
  comm::Communicator& comm = model_.comm();
  if (model_.mesh().num_replicas() == 1) return blob.tensor;
  const std::vector<int64_t> sizes = comm.exchange(blob.tensor.numel(), blob.name);
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  const at::Tensor mine = at::zeros({longest}, blob.tensor.options().device(comm.device()));
  mine.narrow(0, 0, blob.tensor.numel()).copy_(blob.tensor);
  const at::Tensor all = at::empty({comm.size() * mine.numel()}, mine.options());
  comm.all_gather(all, mine, blob.name)->wait();
  return all.narrow(0, file * mine.numel(), mine.numel())
      .narrow(0, 0, sizes[static_cast<size_t>(file)])
      .cpu();
}

std::unique_ptr<CheckpointWriter::Job> CheckpointWriter::prepare(const CheckpointContent& content,
                                                                 const std::vector<at::Tensor>& blobs,
                                                                 bool copy) {
  const zero::PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  snapshot_used_ = 0;
  auto job = std::make_unique<Job>();
  std::vector<zero::OffloadedTensor*> read_next;  // in the order of the file
  const auto keep = [&](const at::Tensor& tensor) {
    job->tensors.push_back(on_host(tensor, copy));
    return std::span<const std::byte>(bytes_of(job->tensors.back()));
  };
  checkpoint::SaveRequest& request = job->request;
  request.directory = content.directory;
  request.tag = content.tag;
  request.rank = model_.mesh().owned_part();
  for (int part = 0; part < model_.comm().size(); ++part)
    request.writers.push_back(model_.mesh().rank_of_owned_part(part));
  for (size_t file = 0; folders_ && file < request.writers.size(); ++file)
    request.owners.push_back(model_.mesh().owned_part(folders_->owner_of(request.writers[file])));
  request.create = folders_ == nullptr;
  request.stage = stage_;
  request.layout = &model_.layout();
  for (std::string_view name : model_.optimizer().state_names()) request.state_names.emplace_back(name);
  request.latest = content.save_latest;
  request.exclude_frozen = content.exclude_frozen_parameters;
  for (int unit = 0; unit < model_.layout().num_units(); ++unit) {
    if (request.exclude_frozen && !model_.layout().units()[unit].trainable) continue;
    const zero::LocalState mine = model_.unit(unit).owned_state();
    const auto source = [&](const at::Tensor& tensor) {
      zero::OffloadedTensor* const on_disk = model_.unit(unit).find_on_disk(tensor);
      if (on_disk == nullptr) return source_of(tensor, copy, *job);
      read_next.push_back(on_disk);
      return bytes_on_disk(*on_disk, tensor);
    };
    checkpoint::UnitData& data = request.units.emplace_back();
    data.weights = source(mine.weights);
    for (const at::Tensor& state : mine.states) data.states.push_back(source(state));
  }
  for (const zero::NamedTensor& buffer : content.buffers)
    request.tensors.push_back({buffer.name, dtype_of(buffer.tensor, buffer.name), buffer.tensor.sizes().vec(),
                               keep(zero::bytes_of_elements(buffer.tensor))});
  for (size_t i = 0; i < blobs.size(); ++i) request.blobs.push_back({content.blobs[i].name, keep(blobs[i])});
  if (job->copied) transfer_->wait(job->copied);  // the next update
  zero::OffloadedTensor::expect(read_next);
  request.state = content.state;
  request.disk = {.sync = config_.fsync, .probe = ScopedCheckpointProbe::current()};
  std::erase(beside_latest_, content.tag);
  if (!content.save_latest) beside_latest_.push_back(content.tag);
  job->protect = protected_tags_;
  job->protect.insert(job->protect.end(), beside_latest_.begin(), beside_latest_.end());
  return job;
}

void CheckpointWriter::write(const Job& job, comm::Communicator& comm) const {
  const auto exchange = [&](const std::string& mine) {
    const std::vector<std::string> by_rank = comm.exchange(mine, "checkpoint " + job.request.tag);
    std::vector<std::string> by_file;
    for (const int rank : job.request.writers) by_file.push_back(by_rank[static_cast<size_t>(rank)]);
    return by_file;
  };
  const checkpoint::SaveResult result = checkpoint::save(job.request, exchange);  // an error changes nothing
  if (!result.warning.empty()) log_.warning(result.warning);
  if (folders_) try {
      folders_->copy(job.request.tag, job.request.rank);
    } catch (...) {
      folders_->discard(job.request.tag);
      throw;
    }
  if (config_.keep_last == 0 || !(folders_ ? folders_->owns() : comm.rank() == 0)) return;
  try {
    checkpoint::keep_last(job.request.directory,
                          {.num = static_cast<int>(config_.keep_last), .protect = job.protect},
                          Disk(job.request.disk));
  } catch (const std::exception& error) {
    log_.warning(str("checkpoint.keep_last: ", comm::error_message(error)));
  }
}

/// A failure may have come before they were waited for, and the next copies go to the same memory.
void CheckpointWriter::wait_for_copies(const Job& job) const {
  if (!job.copied) return;
  try {
    transfer_->synchronize(job.copied);
  } catch (const std::exception&) {
    // A device that has failed copies nothing.
  }
}

std::string CheckpointWriter::save(const CheckpointContent& content) {
  last_failed();
  failure_ = nullptr;
  logged_ = false;
  const std::vector<at::Tensor> blobs = blobs_of_file(content);
  std::shared_ptr<Job> job;
  comm::on_all_ranks<CheckpointError>(model_.comm(), "copies of a checkpoint",
                                      [&] { job = prepare(content, blobs, /*copy=*/in_background()); });
  const std::string path = (job->request.directory / job->request.tag).string();
  if (!in_background()) {
    write(*job, model_.comm());
    return path;
  }
  const auto write_in_background = [this, job, device = model_.comm().device()] {
    comm::set_device_of_thread(device);
    std::exception_ptr failure;
    try {
      write(*job, *own_comm_);
    } catch (...) {
      failure = std::current_exception();
    }
    wait_for_copies(*job);
    const std::lock_guard lock(mutex_);
    failure_ = failure;
  };
  try {
    thread_ = std::thread(write_in_background);
  } catch (const std::system_error& error) {
    log_.warning(str("checkpoint.async: no thread can be started (", error.what(),
                     "); the checkpoint is written before training goes on"));
    write_in_background();
  }
  return path;
}

void CheckpointWriter::log_failure(const std::exception_ptr& failure) const {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    log_.warning(str("a checkpoint was not written: ", error.what()));
  }
}

void CheckpointWriter::report() {
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    if (failure_ && !std::exchange(logged_, true)) failure = failure_;
  }
  if (failure) log_failure(failure);
}

bool CheckpointWriter::last_failed() {
  if (thread_.joinable()) thread_.join();
  report();
  return failure_ != nullptr;
}

void CheckpointWriter::finish() {
  if (thread_.joinable()) thread_.join();
  if (std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
}

}  // namespace tessera

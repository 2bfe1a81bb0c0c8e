#include "zero/deferred/deferred_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "zero/deferred/closed_storage.h"
#include "zero/deferred/operator_log.h"
#include "zero/deferred/recorder.h"

namespace tessera::zero {
namespace {

/// Generators belong to the process, and are watched while a model is made.
std::mutex& one_at_a_time() {
  static std::mutex mutex;
  return mutex;
}

std::string reason_of(const std::string& text) { return text.substr(0, text.find('\n')); }

/// A generator's state as it travels.
std::string state_bytes(const at::Tensor& state) {
  return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()};
}

at::Tensor state_of(const std::string& bytes, const at::Tensor& like) {
  at::Tensor state = like.clone();
  TESSERA_CHECK(bytes.size() == state.nbytes());
  std::copy(bytes.begin(), bytes.end(), static_cast<char*>(state.mutable_data_ptr()));
  return state;
}

}  // namespace

DeferredModel::DeferredModel(Logger log) : log_to_(std::move(log)) {}
DeferredModel::~DeferredModel() = default;

void DeferredModel::make(const std::function<void()>& make) {
  std::string why;
  {
    const std::lock_guard lock(one_at_a_time());
    log_ = std::make_unique<deferred::OperatorLog>();
    log_->stream_of(at::detail::getDefaultCPUGenerator());
    try {
      const deferred::Recorder recorder(*log_);
      make();
    } catch (const std::exception& error) {
      why = reason_of(error.what());
    }
    if (why.empty()) {
      try {
        log_->end_recording();
        return;
      } catch (const std::exception& error) {
        why = reason_of(error.what());
      }
    }
    for (int stream = 0; stream < log_->num_streams(); ++stream) log_->stream(stream).restore();
    log_.reset();
  }
  make();  // what is wrong with the model itself is thrown here
  log_to_.warning(str("the model could not be made unit by unit (", why,
                      "): the function was called once more, and the model was made whole, which takes more "
                      "memory. What the function took from an iterator, a file or a counter of its own, it "
                      "has taken twice"));
}

void DeferredModel::begin(Request request) {
  request_ = std::move(request);
  if (!log_) return;
  // Which storages only parameters refer to. A tensor may be listed more than once.
  std::map<int, std::set<const c10::TensorImpl*>> of_parameters;
  std::vector<int> demands, at_once;
  for (size_t i = 0; i < request_.parameters.size(); ++i) {
    const int entry = log_->find(request_.parameters[i]);
    if (entry < 0) continue;
    of_parameters[entry].insert(request_.parameters[i].unsafeGetTensorImpl());
    if (request_.computed[i]) demands.push_back(entry);
  }
  std::map<int, std::set<const c10::TensorImpl*>> of_buffers;
  for (const at::Tensor& buffer : request_.buffers)
    if (const int entry = log_->find(buffer); entry >= 0)
      of_buffers[entry].insert(buffer.unsafeGetTensorImpl());
  for (int entry = 0; entry < log_->num_entries(); ++entry) {
    const auto num_parameters = static_cast<int64_t>(of_parameters[entry].size());
    const auto num_buffers = static_cast<int64_t>(of_buffers[entry].size());
    const int64_t outside = log_->outside_references(entry);
    if (outside == num_parameters) continue;
    log_->entry(entry).kept = true;
    if (request_.first_rank || outside > num_parameters + num_buffers) at_once.push_back(entry);
  }
  demands.insert(demands.end(), at_once.begin(), at_once.end());
  log_->plan(demands, /*all_draws=*/!request_.keeps_generators);
  for (const int entry : at_once) {
    log_->compute(entry, /*to_write=*/false);
    log_->release(entry);
  }
  for (const auto& [entry, tensors] : of_buffers)
    if (!tensors.empty()) log_->receive(entry);
}

void DeferredModel::fill(int parameter, at::Tensor destination) {
  const at::NoGradGuard no_grad;
  const at::Tensor& tensor = request_.parameters[parameter];
  const int entry = log_ ? log_->find(tensor) : -1;
  if (entry < 0) {
    destination.copy_(tensor.reshape(-1));
    return;
  }
  if (!request_.computed[parameter]) {
    destination.zero_();
    return;
  }
  log_->compute(entry, /*to_write=*/false);
  {
    const deferred::Opened opened(log_->entry(entry).storage);
    destination.copy_(tensor.reshape(-1));
  }
  log_->release(entry);
}

void DeferredModel::finish(comm::Communicator& comm) {
  // What ranks began with and drew says whether rank 0's states are right for this one.
  std::string mine;
  if (log_ && !request_.keeps_generators)
    for (int stream = 0; stream < log_->num_streams(); ++stream)
      mine += str(log_->stream(stream).num_draws(), " draws from ",
                  std::hash<std::string>()(state_bytes(log_->stream(stream).initial_state())), "; ");
  const std::vector<std::string> began = comm.exchange(mine, "random generators before making the model");
  const bool sends = comm.rank() == 0, receives = !sends && !mine.empty() && mine == began[0];
  std::vector<at::Tensor> states;
  std::string sent;
  if (!mine.empty() && !receives)
    for (int stream = 0; stream < log_->num_streams(); ++stream) {
      states.push_back(log_->stream(stream).finish());
      if (sends) sent += state_bytes(states.back());
    }
  const std::vector<std::string> ended = comm.exchange(sent, "random generators after making the model");
  if (receives && !ended[0].empty()) {
    size_t place = 0;
    for (int stream = 0; stream < log_->num_streams(); ++stream) {
      const at::Tensor& like = log_->stream(stream).initial_state();
      states.push_back(state_of(ended[0].substr(place, like.nbytes()), like));
      place += like.nbytes();
    }
  }
  for (size_t stream = 0; stream < states.size(); ++stream)
    log_->stream(static_cast<int>(stream)).set_final(states[stream]);
}

MakingCounts DeferredModel::counts() const { return log_ ? log_->counts() : MakingCounts{.whole = true}; }

const void* memory_of(const at::Tensor& tensor) {
  // Asked for its address a storage without memory would throw.
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const void* data = const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks().get();
  return data != nullptr ? data : storage;
}

}  // namespace tessera::zero

#include "comm/gloo.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <net/if.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "comm/c10d_pending.h"
#include "comm/error_message.h"
#include "comm/shm/reduce.h"
#include "comm/torch_dtype.h"
#include "core/error.h"
#include "core/memory_use.h"
#include "core/str.h"

namespace tessera::comm {

class GlooDevices {
 public:
  std::vector<std::shared_ptr<::gloo::transport::Device>> devices;
};

namespace {

using std::chrono::milliseconds;

// Gloo's headers (Debian's) are older than the Gloo inside libtorch, and some of its classes differ. So
// nothing here touches a Gloo object; pointers to them are only passed along.
// (ProcessGroupGloo::setTimeout, inline, would.)

int number_of(const GlooOptions& options) { return options.number < 0 ? options.rank : options.number; }

std::string bound_to(const GlooOptions& options) {
  return options.interfaces.empty() ? options.address : str("GLOO_SOCKET_IFNAME=", options.interfaces);
}

/// Of one slice a rank, one after another, to where the result is wanted. Dispatches no operator.
void reduce_slices(const at::Tensor& slices, at::ScalarType dtype, int num_ranks, const ReduceInto& into) {
  const int64_t slice_bytes = static_cast<int64_t>(slices.nbytes()) / num_ranks;
  std::vector<const void*> inputs;
  for (int rank = 0; rank < num_ranks; ++rank)
    inputs.push_back(static_cast<const char*>(slices.const_data_ptr()) + rank * slice_bytes);
  shm::reduce(
      {.dtype = from_torch(dtype),
       .inputs = inputs.data(),
       .num_inputs = num_ranks,
       .numel = into.shard.numel(),
       .output = {into.shard.data_ptr(), from_torch(into.shard.scalar_type()), into.scale, into.add}});
}

/// c10d's process group with the two things it lacks: tags of our choice, and abort().
class GlooGroup final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  // [Note: tags] Gloo matches messages by tag, which c10d counts up with every collective. A tag of ours also
  // carries a fingerprint of the collective (transport_communicator.cc): two ranks that issue different
  // things under one number never exchange a byte. With plain counting, buffers of different sizes would
  // meet, and Gloo ends the process then, by an exception on its I/O thread.
  void use_tag(uint32_t tag) { collectiveCounter_ = tag; }

  // [Note: aborting Gloo] c10d has no abort for Gloo, and destroying a group waits for what is pending. But a
  // receive that runs into its timeout makes Gloo fail all pending operations of the group and close its
  // connections. So abort() posts one that is never answered. On a connection that is already broken posting
  // throws, hence the loop over peers. Each device has a context of its own, chosen by the tag.
  void abort() override {
    for (int tag = 0; tag < static_cast<int>(contexts_.size()); ++tag) {
      for (int peer = 0; peer < getSize(); ++peer) {
        if (peer == getRank()) continue;
        try {
          std::vector<at::Tensor> unanswered{scratch_};
          recv(unanswered, peer, tag)->wait(milliseconds(1));
        } catch (const std::exception&) {
        }
      }
    }
  }

 private:
  at::Tensor scratch_ = at::zeros({1}, at::kByte);
};

class C10dGlooTransport final : public GlooTransport {
 public:
  C10dGlooTransport(const GroupStore& store, const GlooOptions& options, FailureHook on_failure)
      : options_(options), on_failure_(std::move(on_failure)) {
    // Gloo waits five times this for a connection. Collectives give their own timeout.
    auto group_options =
        c10d::ProcessGroupGloo::Options::create(std::max(options.connect_timeout / 5, milliseconds(1000)));
    group_options->devices = options.devices->devices;
    group_options->group_name = "tessera";
    try {
      group_ = c10::make_intrusive<GlooGroup>(store.c10d_store(), options.rank, options.size, group_options);
    } catch (const std::exception& error) {
      store.check_all_alive(milliseconds(200));
      throw CommError(str("rank ", number_of(options), " cannot connect to the other ranks over ",
                          bound_to(options), " (", error_message(error), ")"));
    }
  }

  std::string_view name() const override { return "gloo"; }
  bool wait_blocks() const override { return true; }
  bool buffers_reductions() const override { return true; }

  // [Note: all-gather over Gloo] c10d's own all-gather stages the result in a buffer of full size and copies
  // it out with operators on a worker thread, under the thread-local state of the issuing thread: memory we
  // do not have, and operators that a listener (zero/residency) would take for the model's. One broadcast a
  // slice moves the same bytes straight to where they belong.
  PendingPtr all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) override {
    const int64_t shard_numel = shard.numel();
    auto* own_slice =
        static_cast<char*>(full.data_ptr()) + static_cast<int64_t>(shard.nbytes()) * options_.rank;
    if (own_slice != shard.data_ptr()) std::memcpy(own_slice, shard.data_ptr(), shard.nbytes());
    std::vector<C10dWork> works;
    for (int root = 0; root < options_.size; ++root) {
      works.push_back(observed(broadcast_one(plain_view(full, root * shard_numel, shard_numel), root,
                                             tag + static_cast<uint32_t>(root)),
                               tag));
    }
    return pending(std::move(works));
  }

  // [Note: reduce-scatter over Gloo] c10d's own is an all-reduce of a copy, which moves twice the bytes.
  // Here each rank sends the others their slices (as bytes: Gloo need not know the type) and sums what it
  // receives in rank order, which gives the same bits as comm/shm for any number of ranks. It needs a buffer
  // for the received slices until they are summed.
  PendingPtr reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) override {
    return reduce_slices_of(full, {}, into, tag);
  }

  PendingPtr reduce_scatter(const at::Tensor& full, const std::vector<int64_t>& numels,
                            const ReduceInto& into, uint32_t tag) override {
    return reduce_slices_of(full, numels, into, tag);
  }

  PendingPtr all_reduce(const at::Tensor& full, double scale, uint32_t tag) override {
    c10d::AllreduceOptions allreduce_options;
    allreduce_options.timeout = options_.timeout;
    std::vector<at::Tensor> tensors{plain_view(full, 0, full.numel())};
    group_->use_tag(tag);
    return pending({observed(group_->allreduce(tensors, allreduce_options), tag)},
                   finish_reduction(full, {full, scale}));
  }

  PendingPtr broadcast(const at::Tensor& buffer, int root, uint32_t tag) override {
    return pending({observed(broadcast_one(plain_view(buffer, 0, buffer.numel()), root, tag), tag)});
  }

  PendingPtr barrier(uint32_t tag) override {
    c10d::BarrierOptions barrier_options;
    barrier_options.timeout = options_.timeout;
    group_->use_tag(tag);
    return pending({observed(group_->barrier(barrier_options), tag)});
  }

  void abort() override { group_->abort(); }

  std::unique_ptr<Transport> duplicate(const GroupStore& store, FailureHook on_failure) override {
    // The devices, each an I/O thread with a listening socket, are shared; the connections are not.
    return std::make_unique<C10dGlooTransport>(store, options_, std::move(on_failure));
  }

  std::unique_ptr<Transport> split(const std::vector<int>& ranks, const GroupStore& store,
                                   FailureHook on_failure) override {
    GlooOptions options = options_;
    options.number = number_of(options_);
    options.rank = place_of(ranks, options_.rank);
    options.size = static_cast<int>(ranks.size());
    return std::make_unique<C10dGlooTransport>(store, options, std::move(on_failure));
  }

 private:
  /// `numels`: empty: slices of one length.
  PendingPtr reduce_slices_of(const at::Tensor& full, const std::vector<int64_t>& numels,
                              const ReduceInto& into, uint32_t tag) {
    const auto slices = std::make_shared<at::Tensor>(
        reduction_buffer(options_.size * into.shard.numel() * full.element_size()));
    at::Tensor sent = plain_bytes(full);
    at::Tensor received = plain_bytes(slices);  // Gloo's thread frees its view later than `finish` runs
    std::vector<int64_t> sent_bytes, received_bytes;
    for (const int64_t numel : numels) {
      sent_bytes.push_back(numel * full.element_size());
      received_bytes.push_back(into.shard.numel() * full.element_size());
    }
    c10d::AllToAllOptions all_to_all_options;
    all_to_all_options.timeout = options_.timeout;
    group_->use_tag(tag);
    C10dWork work =
        observed(group_->alltoall_base(received, sent, received_bytes, sent_bytes, all_to_all_options), tag);
    return pending({std::move(work)}, [slices, into, dtype = full.scalar_type(), size = options_.size] {
      reduce_slices(*slices, dtype, size, into);
      slices->reset();
    });
  }

  static PendingPtr pending(std::vector<C10dWork> works, std::function<void()> finish = {}) {
    return std::make_unique<C10dPending>(std::move(works), /*wait_blocks=*/true, std::move(finish));
  }

  C10dWork broadcast_one(const at::Tensor& buffer, int root, uint32_t tag) {
    c10d::BroadcastOptions broadcast_options;
    broadcast_options.rootRank = root;
    broadcast_options.timeout = options_.timeout;
    std::vector<at::Tensor> tensors{buffer};
    group_->use_tag(tag);
    return group_->broadcast(tensors, broadcast_options);
  }

  /// Reports a failure when it happens, even while this rank is busy elsewhere: the others wait for the
  /// report.
  C10dWork observed(C10dWork work, uint32_t tag) const {
    work->getFuture()->addCallback(
        [on_failure = on_failure_, on_end = options_.on_end, tag](c10::ivalue::Future& future) {
          if (future.hasError()) on_failure(error_message(future.exception_ptr()), tag);
          if (on_end) on_end();
        });
    return work;
  }

  GlooOptions options_;
  FailureHook on_failure_;
  c10::intrusive_ptr<GlooGroup> group_;
};

}  // namespace

std::shared_ptr<GlooDevices> open_gloo_devices(const GlooOptions& options) {
  auto opened = std::make_shared<GlooDevices>();
  try {
    if (options.interfaces.empty()) {
      opened->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
      return opened;
    }
    std::istringstream names(options.interfaces);
    for (std::string name; std::getline(names, name, ',');) {
      if (if_nametoindex(name.c_str()) == 0) {
        throw CommError(str("GLOO_SOCKET_IFNAME=", options.interfaces,
                            ": this host has no network interface '", name, "'"));
      }
      opened->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name));
    }
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError(str("rank ", number_of(options), " cannot listen on ", bound_to(options), " (",
                        error_message(error), ")"));
  }
  return opened;
}

at::Tensor reduction_buffer(int64_t bytes) {
  const MemoryFor use(MemoryUse::kCommunication);
  const at::DisableRecordFunctionGuard guard;
  return at::empty({bytes}, at::kByte);
}

std::unique_ptr<GlooTransport> make_gloo_transport(const GroupStore& store, const GlooOptions& given,
                                                   FailureHook on_failure) {
  GlooOptions options = given;
  if (!options.devices) options.devices = open_gloo_devices(options);
  return std::make_unique<C10dGlooTransport>(store, options, std::move(on_failure));
}

}  // namespace tessera::comm

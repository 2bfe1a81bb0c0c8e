#include "comm/gloo.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <cstring>

#include "comm/c10d_pending.h"
#include "comm/error_message.h"
#include "comm/gloo_group.h"
#include "comm/shm/reduce.h"
#include "comm/torch_dtype.h"
#include "core/error.h"
#include "core/memory_use.h"
#include "core/str.h"

namespace tessera::comm {

namespace {

using std::chrono::milliseconds;

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

class C10dGlooTransport final : public GlooTransport {
 public:
  C10dGlooTransport(const GroupStore& store, const GlooOptions& options, FailureHook on_failure)
      : options_(options), on_failure_(std::move(on_failure)), group_(connect_gloo_group(store, options_)) {}

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
  const c10::intrusive_ptr<GlooGroup> group_;
};

}  // namespace

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

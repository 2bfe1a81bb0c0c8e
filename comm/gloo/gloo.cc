#include "comm/gloo/gloo.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <xxhash.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "comm/c10d_pending.h"
#include "comm/control/error_message.h"
#include "comm/gloo/gloo_group.h"
#include "comm/shm/reduce.h"
#include "comm/torch_dtype.h"
#include "core/error.h"
#include "core/memory/memory_use.h"

namespace tessera::comm {

namespace {

using std::chrono::milliseconds;

/// Adds up one slice a rank, which lie one after another. Dispatches no operator.
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

// [Note: verified collectives]
// TCP's checksum has 16 bits, and switches and network cards compute it anew: bytes that are altered on their
// way may arrive under a right one. With JoinOptions::verify each rank tells each other one a digest (XXH3)
// of what it sends to it, over connections of their own, and compares what it has received with the digest of
// its sender before anything is computed with it. So all collectives have to move bytes as they are: an
// all-reduce, which in Gloo passes on partial sums, brings every rank every other rank's buffer instead, and
// sums in rank order.

/// Has what a collective's ranks say of the bytes that they send.
struct Digests {
  at::Tensor sent, received;  ///< (ranks * 8) bytes
  C10dWork exchange;
  std::vector<int> names;  ///< as in GlooOptions
  int rank = 0;

  int name(int r) const { return names[static_cast<size_t>(r)]; }
  /// Throws CommError unless the bytes are those that `from` has sent.
  void check(int from, const void* data, int64_t bytes) const {
    if (from == rank) return;
    uint64_t expected = 0;
    std::memcpy(&expected, static_cast<const uint64_t*>(received.const_data_ptr()) + from, sizeof expected);
    if (XXH3_64bits(data, static_cast<size_t>(bytes)) == expected) return;
    throw CommError(kAlteredData, "rank ", name(rank), " has received ", bytes, " bytes from rank ",
                    name(from), " that are not those that rank ", name(from), " sent");
  }
};

/// Holds what Gloo's threads call. A group that was aborted may outlive its transport, and then calls nobody.
struct Observers {
  std::mutex mutex;
  FailureHook on_failure;
  std::function<void()> on_end;
};

class C10dGlooTransport final : public GlooTransport {
 public:
  C10dGlooTransport(const GroupStore& store, const GlooOptions& options, FailureHook on_failure)
      : options_(options),
        observers_(std::make_shared<Observers>()),
        group_(connect_gloo_group(store, options_)) {
    observers_->on_failure = std::move(on_failure);
    observers_->on_end = options_.on_end;
    if (options_.verify) digests_ = connect_gloo_group(store.under("digests"), options_);
  }

  ~C10dGlooTransport() override {
    if (!aborted_) return;
    {
      const std::lock_guard lock(observers_->mutex);
      observers_->on_failure = nullptr;
      observers_->on_end = nullptr;
    }
    release_aborted(std::move(group_));
    if (digests_) release_aborted(std::move(digests_));
  }

  std::string_view name() const override { return "gloo"; }
  bool wait_blocks() const override { return true; }
  bool buffers_reductions() const override { return true; }

  // All-gather over Gloo: c10d's own all-gather stages the result in a buffer of full size and copies
  // it out with operators on a worker thread, under the thread-local state of the issuing thread: memory we
  // do not have, and operators that a listener (zero/gather/residency) would take for the model's. One
  // broadcast a slice moves the same bytes straight to where they belong.
  PendingPtr all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) override {
    const auto shard_bytes = static_cast<int64_t>(shard.nbytes());
    auto* own_slice = static_cast<char*>(full.data_ptr()) + shard_bytes * options_.rank;
    if (own_slice != shard.data_ptr()) std::memcpy(own_slice, shard.data_ptr(), shard.nbytes());
    const auto digests = tell_digest(own_slice, shard_bytes);
    return pending(broadcast_slices(full, shard.numel(), tag), tag, digests,
                   digests
                       ? [full, shard_bytes, digests,
                          size = options_.size()] { check_slices(digests.get(), full, shard_bytes, size); }
                       : std::function<void()>());
  }

  // Reduce-scatter over Gloo: c10d's own is an all-reduce of a copy, which moves twice the bytes.
  // Here each rank sends the others their slices (as bytes: Gloo need not know the type) and sums what it
  // receives in rank order, which gives the same bits as comm/shm/shm for any number of ranks. It needs a
  // buffer for the received slices until they are summed.
  PendingPtr reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) override {
    return reduce_scatter(full, {}, into, tag);
  }

  PendingPtr reduce_scatter(const at::Tensor& full, const std::vector<int64_t>& numels,
                            const ReduceInto& into, uint32_t tag) override {
    const int64_t received_slice = into.shard.numel() * full.element_size();
    const auto slices = std::make_shared<at::Tensor>(reduction_buffer(options_.size() * received_slice));
    at::Tensor sent = plain_bytes(full);
    at::Tensor received = plain_bytes(slices);  // Gloo's thread frees its view later than `finish` runs
    std::vector<int64_t> sent_bytes, received_bytes;
    for (const int64_t numel : numels) {
      sent_bytes.push_back(numel * full.element_size());
      received_bytes.push_back(received_slice);
    }
    std::shared_ptr<Digests> digests;
    if (options_.verify) {
      std::vector<uint64_t> of_slices;
      const auto* slice = static_cast<const char*>(full.const_data_ptr());
      for (int to = 0; to < options_.size(); ++to) {
        const int64_t bytes = numels.empty() ? received_slice : sent_bytes[static_cast<size_t>(to)];
        of_slices.push_back(to == options_.rank ? 0 : XXH3_64bits(slice, static_cast<size_t>(bytes)));
        slice += bytes;
      }
      digests = tell_digests(of_slices);
    }
    c10d::AllToAllOptions all_to_all_options;
    all_to_all_options.timeout = options_.timeout;
    group_->use_tag(tag);
    C10dWork work = group_->alltoall_base(received, sent, received_bytes, sent_bytes, all_to_all_options);
    return pending(
        {std::move(work)}, tag, digests,
        [slices, into, digests, received_slice, dtype = full.scalar_type(), size = options_.size()] {
          check_slices(digests.get(), *slices, received_slice, size);
          reduce_slices(*slices, dtype, size, into);
          slices->reset();
        });
  }

  // Gloo adds bools up as bytes, which leaves bytes that are no bools, and has no sum of int16.
  PendingPtr all_reduce(const at::Tensor& full, double scale, uint32_t tag) override {
    const at::ScalarType dtype = full.scalar_type();
    if (options_.verify || dtype == at::kBool || dtype == at::kShort)
      return all_reduce_of_all(full, scale, tag);
    c10d::AllreduceOptions allreduce_options;
    allreduce_options.timeout = options_.timeout;
    std::vector<at::Tensor> tensors{plain_view(full, 0, full.numel())};
    group_->use_tag(tag);
    if (dtype == at::kHalf && scale != 1) {  // first: a sum may overflow whose mean does not
      reduce_slices(full, dtype, 1, {tensors.front(), scale});
      return pending({group_->allreduce(tensors, allreduce_options)}, tag, nullptr, nullptr);
    }
    return pending({group_->allreduce(tensors, allreduce_options)}, tag, nullptr,
                   finish_reduction(full, {full, scale}));
  }

  PendingPtr broadcast(const at::Tensor& buffer, int root, uint32_t tag) override {
    const auto bytes = static_cast<int64_t>(buffer.nbytes());
    const auto digests = tell_digest(buffer.const_data_ptr(), options_.rank == root ? bytes : 0);
    return pending(
        {broadcast_one(plain_view(buffer, 0, buffer.numel()), root, tag)}, tag, digests,
        digests ? [buffer, bytes, digests, root] { digests->check(root, buffer.const_data_ptr(), bytes); }
                : std::function<void()>());
  }

  PendingPtr barrier(uint32_t tag) override {
    c10d::BarrierOptions barrier_options;
    barrier_options.timeout = options_.timeout;
    group_->use_tag(tag);
    return pending({group_->barrier(barrier_options)}, tag);
  }

  void abort() override {
    aborted_ = true;
    group_->abort();
    if (digests_) digests_->abort();
  }
  bool waits_at_end() const override { return !aborted_; }

  std::unique_ptr<Transport> duplicate(const GroupStore& store, FailureHook on_failure) override {
    // The devices, each an I/O thread with a listening socket, are shared; the connections are not.
    return std::make_unique<C10dGlooTransport>(store, options_, std::move(on_failure));
  }

  std::unique_ptr<Transport> split(const std::vector<int>& ranks, const GroupStore& store,
                                   FailureHook on_failure) override {
    return std::make_unique<C10dGlooTransport>(store, options_.of_ranks(ranks), std::move(on_failure));
  }

 private:
  /// Every rank's buffer goes to all, which add them up in rank order: [Note: verified collectives], and
  /// types that Gloo does not sum.
  PendingPtr all_reduce_of_all(const at::Tensor& full, double scale, uint32_t tag) {
    const auto bytes = static_cast<int64_t>(full.nbytes());
    const auto slices = std::make_shared<at::Tensor>(reduction_buffer(options_.size() * bytes));
    const at::Tensor all = plain_bytes(slices);
    std::memcpy(static_cast<char*>(slices->data_ptr()) + options_.rank * bytes, full.const_data_ptr(),
                full.nbytes());
    const auto digests = tell_digest(full.const_data_ptr(), bytes);
    auto finish = [slices, full, scale, digests, bytes, size = options_.size()] {
      check_slices(digests.get(), *slices, bytes, size);
      reduce_slices(*slices, full.scalar_type(), size, {plain_view(full, 0, full.numel()), scale});
      slices->reset();
    };
    return pending(broadcast_slices(all, bytes, tag), tag, digests, std::move(finish));
  }

  static void check_slices(const Digests* digests, const at::Tensor& slices, int64_t bytes, int size) {
    for (int from = 0; digests != nullptr && from < size; ++from)
      digests->check(from, static_cast<const char*>(slices.const_data_ptr()) + from * bytes, bytes);
  }

  /// Tells all ranks the digest of the same bytes. Returns null without `verify`.
  std::shared_ptr<Digests> tell_digest(const void* data, int64_t bytes) {
    if (!options_.verify) return nullptr;
    return tell_digests(std::vector<uint64_t>(static_cast<size_t>(options_.size()),
                                              XXH3_64bits(data, static_cast<size_t>(bytes))));
  }

  /// Tells each rank the digest of what this rank sends to it.
  std::shared_ptr<Digests> tell_digests(const std::vector<uint64_t>& of_sent) {
    const auto bytes = static_cast<int64_t>(of_sent.size() * sizeof(uint64_t));
    const auto digests = std::make_shared<Digests>(
        Digests{reduction_buffer(bytes), reduction_buffer(bytes), {}, options_.names, options_.rank});
    std::memcpy(digests->sent.data_ptr(), of_sent.data(), static_cast<size_t>(bytes));
    std::vector<int64_t> equal_slices;
    c10d::AllToAllOptions all_to_all_options;
    all_to_all_options.timeout = options_.timeout;
    digests->exchange = digests_->alltoall_base(digests->received, digests->sent, equal_slices, equal_slices,
                                                all_to_all_options);
    return digests;
  }

  /// Slice r of `slice_numel` elements is rank r's. One broadcast each.
  std::vector<C10dWork> broadcast_slices(const at::Tensor& full, int64_t slice_numel, uint32_t tag) {
    std::vector<C10dWork> works;
    for (int root = 0; root < options_.size(); ++root)
      works.push_back(broadcast_one(plain_view(full, root * slice_numel, slice_numel), root,
                                    tag + static_cast<uint32_t>(root)));
    return works;
  }

  C10dWork broadcast_one(const at::Tensor& buffer, int root, uint32_t tag) {
    c10d::BroadcastOptions broadcast_options;
    broadcast_options.rootRank = root;
    broadcast_options.timeout = options_.timeout;
    std::vector<at::Tensor> tensors{buffer};
    group_->use_tag(tag);
    return group_->broadcast(tensors, broadcast_options);
  }

  /// A collective made of `works`, and of the exchange of their digests.
  PendingPtr pending(std::vector<C10dWork> works, uint32_t tag,
                     const std::shared_ptr<Digests>& digests = nullptr,
                     std::function<void()> finish = {}) const {
    if (digests) works.push_back(digests->exchange);
    observe(works, tag);
    return std::make_unique<C10dPending>(std::move(works), /*wait_blocks=*/true, std::move(finish));
  }

  /// Reports a failure when it happens, even while this rank is busy elsewhere: the others wait for the
  /// report.
  void observe(const std::vector<C10dWork>& works, uint32_t tag) const {
    const auto left = std::make_shared<std::atomic<size_t>>(works.size());
    for (const C10dWork& work : works)
      work->getFuture()->addCallback([observers = observers_, left, tag](c10::ivalue::Future& future) {
        const std::lock_guard lock(observers->mutex);
        if (future.hasError() && observers->on_failure)
          observers->on_failure(error_message(future.exception_ptr()), tag);
        if (--*left == 0 && observers->on_end) observers->on_end();
      });
  }

  GlooOptions options_;
  const std::shared_ptr<Observers> observers_;
  std::atomic<bool> aborted_ = false;
  c10::intrusive_ptr<GlooGroup> group_;
  c10::intrusive_ptr<GlooGroup> digests_;  ///< null without `verify`
};

}  // namespace

at::Tensor reduction_buffer(int64_t bytes) {
  const MemoryFor use(MemoryUse::kCommunication);
  const at::DisableRecordFunctionGuard guard;
  return at::empty({bytes}, at::kByte);
}

GlooOptions GlooOptions::of_ranks(const std::vector<int>& ranks) const {
  GlooOptions options = *this;
  options.rank = place_of(ranks, rank);
  options.names = chosen_from(names, ranks);
  return options;
}

std::unique_ptr<GlooTransport> make_gloo_transport(const GroupStore& store, const GlooOptions& given,
                                                   FailureHook on_failure) {
  GlooOptions options = given;
  if (options.devices.empty()) options.devices = open_gloo_devices(options);
  return std::make_unique<C10dGlooTransport>(store, options, std::move(on_failure));
}

}  // namespace tessera::comm

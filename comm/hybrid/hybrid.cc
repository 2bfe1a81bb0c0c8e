#include "comm/hybrid/hybrid.h"

#include <ATen/ops/from_blob.h>

#include <cstring>
#include <utility>

#include "comm/hybrid/task_queue.h"
#include "comm/memory/reported_memory.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using hybrid::Column;
using hybrid::Kind;
using hybrid::Operation;
using hybrid::OperationPtr;
using hybrid::TaskQueue;
using std::chrono::milliseconds;

class HybridTransport final : public Transport {
 public:
  HybridTransport(const GroupStore& store, FoundHosts found, GlooOptions gloo, FailureHook on_failure)
      : found_(std::move(found)), gloo_(std::move(gloo)) {
    const auto columns = [&](std::function<void()> on_end, const FailureHook& on_column_failure) {
      return make_columns(store, std::move(on_end), on_column_failure);
    };
    queue_ = std::make_shared<TaskQueue>(found_.hosts, gloo_.rank, found_.peers, gloo_.timeout,
                                         std::move(on_failure), columns);
  }

  ~HybridTransport() override { queue_->close(); }

  std::string_view name() const override { return on_one_host() ? "shm" : "hybrid"; }
  bool wait_blocks() const override { return true; }
  bool waits_at_end() const override { return !on_one_host(); }

  PendingPtr all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) override {
    auto* const own_slice = static_cast<char*>(full.data_ptr()) + gloo_.rank * shard.nbytes();
    if (own_slice != shard.const_data_ptr()) std::memcpy(own_slice, shard.const_data_ptr(), shard.nbytes());
    return issue(Kind::kAllGather, full, tag);
  }

  PendingPtr reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) override {
    return issue(Kind::kReduceScatter, full, tag, into);
  }

  PendingPtr all_reduce(const at::Tensor& full, double scale, uint32_t tag) override {
    return issue(Kind::kAllReduce, full, tag, {{}, scale});
  }

  PendingPtr broadcast(const at::Tensor& buffer, int root, uint32_t tag) override {
    return issue(Kind::kBroadcast, buffer, tag, {}, root);
  }

  PendingPtr barrier(uint32_t tag) override { return issue(Kind::kBarrier, {}, tag); }

  at::Tensor allocate(int64_t bytes, bool common) override {
    auto region = queue_->allocate(bytes, common);
    void* data = region->address(found_.peers->rank());
    return reported_memory(std::move(region), data, bytes, common ? found_.peers->size() : 1);
  }
  HostRank host_rank() const override { return {found_.peers->rank(), found_.peers->size()}; }
  int64_t bytes_from_other_hosts() const override { return queue_->received_bytes(); }

  void set_watch(std::function<void()> watch) override { queue_->set_watch(std::move(watch)); }

  at::Tensor peer_view(const at::Tensor& mine, int rank) override {
    if (!on_one_host()) return {};
    const void* theirs = queue_->peer_address(mine.data_ptr(), static_cast<int64_t>(mine.nbytes()), rank);
    if (theirs == nullptr) return {};
    return at::for_blob(const_cast<void*>(theirs), mine.sizes())
        .deleter([mine](void*) {})
        .options(mine.options())
        .make_tensor();
  }

  void abort() override { queue_->abort(); }

  std::unique_ptr<Transport> duplicate(const GroupStore& store, FailureHook on_failure) override {
    return std::make_unique<HybridTransport>(store, found_, gloo_, std::move(on_failure));
  }

  /// Makes a transport over what the ranks need: shared memory alone, Gloo alone, or both.
  std::unique_ptr<Transport> split(const std::vector<int>& ranks, const GroupStore& store,
                                   FailureHook on_failure) override {
    std::vector<int> host_of;  // by rank
    for (const int rank : ranks) host_of.push_back(found_.hosts->host_of(rank));
    const auto hosts = std::make_shared<const Hosts>(host_of);
    const GlooOptions gloo = gloo_.of_ranks(ranks);
    if (hosts->num_hosts() == gloo.size()) return make_gloo_transport(store, gloo, std::move(on_failure));
    return std::make_unique<HybridTransport>(
        store, connect_hosts(store, hosts, gloo.rank, gloo.names, gloo.connect_timeout), gloo,
        std::move(on_failure));
  }

 private:
  bool on_one_host() const { return found_.hosts->is_one(); }

  PendingPtr issue(Kind kind, const at::Tensor& full, uint32_t tag, ReduceInto into = {}, int root = 0) {
    const auto operation = std::make_shared<Operation>();
    operation->kind = kind;
    operation->tag = tag;
    operation->full = full;
    operation->into = std::move(into);
    operation->root = root;
    queue_->issue(operation);
    return std::make_unique<PendingCall>(
        [queue = queue_, operation](milliseconds limit) { return queue->wait(*operation, limit); });
  }

  /// Columns are connected in ascending order on every rank, so that none waits for another in a circle.
  std::vector<Column> make_columns(const GroupStore& store, std::function<void()> on_end,
                                   const FailureHook& on_failure) const {
    const Hosts& hosts = *found_.hosts;
    GlooOptions options = gloo_;
    options.rank = hosts.host_of(gloo_.rank);
    options.on_end = std::move(on_end);
    std::vector<Column> columns;
    for (const int number : hosts.columns_of(gloo_.rank)) {
      Column& column = columns.emplace_back();
      column.number = number;
      options.names.clear();
      for (int host = 0; host < hosts.num_hosts(); ++host)
        options.names.push_back(gloo_.name(hosts.carrier(host, number)));
      column.reduce = make_gloo_transport(store.under(str("reduce/", number)), options, on_failure);
      column.gather = make_gloo_transport(store.under(str("gather/", number)), options, on_failure);
    }
    return columns;
  }

  const FoundHosts found_;
  const GlooOptions gloo_;  ///< of the whole group, with devices
  std::shared_ptr<TaskQueue> queue_;
};

}  // namespace

std::unique_ptr<Transport> make_hybrid_transport(const GroupStore& store, const FoundHosts& found,
                                                 const GlooOptions& gloo, FailureHook on_failure) {
  GlooOptions options = gloo;
  if (!found.hosts->is_one() && options.devices.empty()) options.devices = open_gloo_devices(options);
  return std::make_unique<HybridTransport>(store, found, std::move(options), std::move(on_failure));
}

}  // namespace tessera::comm

#include "comm/p2p/p2p.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/memory/reported_memory.h"
#include "comm/p2p/group.h"
#include "comm/torch_dtype.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

DType element_type(const at::Tensor& tensor) { return from_torch(tensor.scalar_type()); }

class P2pPending final : public Pending {
 public:
  /// `blocks`: wait() waits until the result is there, and not only the stream.
  P2pPending(std::shared_ptr<p2p::Group> group, p2p::Issued issued, bool blocks)
      : group_(std::move(group)), issued_(std::move(issued)), blocks_(blocks) {}

  bool poll() override {
    finished_ = finished_ || group_->poll(issued_);
    return finished_;
  }

  bool wait(milliseconds limit) override {
    const auto deadline = steady_clock::now() + limit;
    if (finished_) return true;
    if (!group_->wait(issued_, limit)) return false;
    while (!poll() && blocks_) {
      if (steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

 private:
  const std::shared_ptr<p2p::Group> group_;
  const p2p::Issued issued_;
  const bool blocks_;
  bool finished_ = false;
};

class P2pTransport final : public Transport {
 public:
  P2pTransport(std::shared_ptr<shm::PeerSockets> peers, P2pOptions options, FailureHook on_failure)
      : options_(std::move(options)),
        group_(std::make_shared<p2p::Group>(options_.device, std::move(peers),
                                            p2p::GroupOptions{.timeout = options_.timeout,
                                                              .on_failure = std::move(on_failure),
                                                              .first_number = options_.first_number})) {}

  P2pTransport(const P2pTransport&) = delete;
  P2pTransport& operator=(const P2pTransport&) = delete;
  /// Pendings, which share the group, may be destroyed after the buffers that it uses.
  ~P2pTransport() override { group_->close(); }

  std::string_view name() const override { return "p2p"; }
  bool wait_blocks() const override { return false; }

  PendingPtr all_gather(const at::Tensor& full, const at::Tensor& shard, uint32_t tag) override {
    return pending(
        group_->all_gather(full.data_ptr(), shard.data_ptr(), static_cast<int64_t>(shard.nbytes()), tag));
  }

  PendingPtr reduce_scatter(const at::Tensor& full, const ReduceInto& into, uint32_t tag) override {
    return pending(
        group_->reduce_scatter(full.data_ptr(), element_type(full), into.shard.numel(),
                               {into.shard.data_ptr(), element_type(into.shard), into.scale, into.add}, tag));
  }

  PendingPtr all_reduce(const at::Tensor& full, double scale, uint32_t tag) override {
    return pending(group_->all_reduce(full.data_ptr(), element_type(full), full.numel(), scale, tag));
  }

  PendingPtr broadcast(const at::Tensor& buffer, int root, uint32_t tag) override {
    return pending(group_->broadcast(buffer.data_ptr(), static_cast<int64_t>(buffer.nbytes()), root, tag));
  }

  PendingPtr barrier(uint32_t tag) override { return pending(group_->barrier(tag), /*blocks=*/true); }

  at::Tensor allocate_symmetric(int64_t bytes) override {
    auto region = group_->allocate(bytes);
    void* data = region->address(group_->rank());
    return reported_memory(std::move(region), data, bytes, /*num_sharing=*/1, group_->device()->place());
  }

  void set_watch(std::function<void()> watch) override { group_->set_watch(std::move(watch)); }

  void abort() override { group_->abort(); }

  std::unique_ptr<Transport> duplicate(const GroupStore&, FailureHook on_failure) override {
    return std::make_unique<P2pTransport>(group_->peers(), options_, std::move(on_failure));
  }

  std::unique_ptr<Transport> split(const std::vector<int>& ranks, const GroupStore& store,
                                   FailureHook on_failure) override {
    P2pOptions options = options_;
    options.rank = place_of(ranks, options_.rank);
    options.size = static_cast<int>(ranks.size());
    options.numbers.clear();
    for (const int rank : ranks) options.numbers.push_back(group_->peers()->number_of(rank));
    return make_p2p_transport(store, options, std::move(on_failure));
  }

 private:
  PendingPtr pending(p2p::Issued issued, bool blocks = false) const {
    return std::make_unique<P2pPending>(group_, std::move(issued), blocks);
  }

  const P2pOptions options_;
  const std::shared_ptr<p2p::Group> group_;
};

void await(Pending& pending, milliseconds timeout) {
  const auto deadline = steady_clock::now() + timeout;
  while (!pending.poll()) {
    if (steady_clock::now() >= deadline) throw CommError(str("timed out after ", name_duration(timeout)));
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace

std::unique_ptr<Transport> make_p2p_transport(const GroupStore& store, const P2pOptions& options,
                                              FailureHook on_failure) {
  return std::make_unique<P2pTransport>(
      std::make_shared<shm::PeerSockets>(store.under("p2p"), options.rank, options.size,
                                         options.connect_timeout, options.numbers),
      options, std::move(on_failure));
}

std::string obstacle_to_p2p(const GroupStore& store, const P2pOptions& given) {
  P2pOptions options = given;
  options.timeout = options.connect_timeout;
  at::Tensor full, sum;  // whatever fails, they outlive the transport, whose stream uses them
  try {
    const auto transport = make_p2p_transport(store, options, {});
    constexpr int64_t kNumel = 1 << 16;
    const auto floats = at::TensorOptions().device(options.device->place()).dtype(at::kFloat);
    full = transport->allocate_symmetric(options.size * kNumel * static_cast<int64_t>(sizeof(float)))
               .view(at::kFloat);
    const at::Tensor mine = full.narrow(0, options.rank * kNumel, kNumel);
    const auto step = static_cast<uint32_t>(options.size);
    mine.fill_(options.rank + 1);
    await(*transport->all_gather(full, mine, step), options.timeout);
    const at::Tensor expected =
        at::arange(1, options.size + 1, floats).view({options.size, 1}).expand({options.size, kNumel});
    if (!at::equal(full.view({options.size, kNumel}), expected))
      return str("rank ", options.rank, " does not read what other ranks have written");
    full.fill_(options.rank + 1);
    sum = at::empty({kNumel}, floats);
    await(*transport->reduce_scatter(full, {sum}, 2 * step), options.timeout);
    if (!sum.eq(options.size * (options.size + 1) / 2).all().item<bool>())
      return str("rank ", options.rank, " does not sum what other ranks have written");
    await(*transport->barrier(3 * step), options.timeout);
    return "";
  } catch (const std::exception& error) {
    return error_message(error);
  }
}

}  // namespace tessera::comm

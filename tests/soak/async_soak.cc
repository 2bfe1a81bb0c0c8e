// Four ranks as threads save asynchronously at every step, on disks that are slow or fail.
//
//   async_soak [ITERATIONS] [SEED]
//
// After each save all ranks get the same outcome, at any time and from any of report(), last_failed(),
// finish() and the next save(). `latest` names the last save that succeeded, and loading it gives what was in
// memory at that save.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <thread>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/files/catalog.h"
#include "checkpoint/read/verify.h"
#include "core/files/disk.h"
#include "engine/checkpoint/checkpoint_state.h"
#include "engine/checkpoint/checkpoint_writer_internal.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"

namespace tessera::testing {
namespace {

constexpr int kWorld = 4;
constexpr int kKeepLast = 2;
constexpr const char* kBroken = "No space left on device";

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("FAILED: " + what);
}

/// What happens to one save, drawn equally on all ranks.
struct Plan {
  enum class Disk { kSound, kSlow, kBroken } disk = Disk::kSound;
  int rank = 0;       // whose disk it is
  int operation = 0;  // the first that fails
  int steps = 0;      // until it is asked after
  enum class Ask { kFinish, kLastFailed, kNever } ask = Ask::kFinish;
  bool load = false;
};

Plan draw(std::mt19937& random) {
  Plan plan;
  const auto below = [&](unsigned limit) { return static_cast<int>(random() % limit); };
  const int disk = below(10);
  plan.disk = disk < 3 ? Plan::Disk::kSound : disk < 6 ? Plan::Disk::kSlow : Plan::Disk::kBroken;
  plan.rank = below(kWorld);
  plan.operation = 1 + below(plan.rank == 0 ? 45 : 12);
  plan.steps = below(3);
  plan.ask = static_cast<Plan::Ask>(below(3));
  plan.load = below(4) == 0;
  return plan;
}

struct Counts {
  int saves = 0, failed = 0, unasked = 0, loads = 0;
};

/// One rank.
class Soak {
 public:
  Soak(comm::CommunicatorPtr comm, const std::string& folder, unsigned seed)
      : comm_(comm),
        folder_(folder),
        random_(seed),
        own_(seed + 1000 * (comm->rank() + 1)),
        saved_(make(comm, 2, model_)),
        other_(make(comm, 3, other_model_)),
        writer_(saved_->sharded_model(), 2, {.async = true, .keep_last = kKeepLast, .fsync = false}, {}) {}

  Counts run(int iterations) {
    for (int i = 0; i < iterations; ++i) save(draw(random_));
    writer_.last_failed();
    return counts_;
  }

 private:
  static std::unique_ptr<Engine> make(const comm::CommunicatorPtr& comm, int stage, SavedNet& model) {
    fill_parameters(*model, 1);
    Case c = small_units(comm->size(), stage);
    c.optimizer = "AdamW";
    c.config.zero.unit_numel = 150;
    return initialize(model, engine_config(c), comm);
  }

  void train() {
    const at::Tensor loss = saved_net_loss(*model_, saved_->global_steps(), saved_->rank());
    saved_->backward(loss);
    saved_->step();
    std::this_thread::sleep_for(
        std::chrono::microseconds(own_() % 3000));  // so that ranks hear at differing steps
    writer_.report();
  }

  CheckpointContent content() {
    CheckpointState state;
    state.global_steps = saved_->global_steps();
    state.optimizer = "AdamW";
    const auto num_parameters = static_cast<int>(saved_->sharded_model().layout().parameters().size());
    for (int parameter = 0; parameter < num_parameters; ++parameter)
      state.parameter_steps.push_back(saved_->sharded_model().parameter_steps(parameter));
    state.config = state.client_state = nlohmann::json::object();
    CheckpointContent content;
    content.directory = folder_;
    content.tag = str("global_step", saved_->global_steps());
    content.buffers = saved_->sharded_model().buffers();
    content.state = to_json(state);
    return content;
  }

  DiskProbe probe_of(const Plan& plan) const {
    if (plan.rank != comm_->rank() || plan.disk == Plan::Disk::kSound) return {};
    return [plan, count = 0](std::string_view operation, const std::filesystem::path& path) mutable {
      if (plan.disk == Plan::Disk::kSlow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (plan.disk == Plan::Disk::kBroken && ++count == plan.operation)
        throw DiskError(str("cannot ", operation, " ", path.string(), ": ", kBroken));
    };
  }

  void save(const Plan& plan) {
    train();
    saved_->sharded_model().broadcast_buffers();
    const CheckpointContent what = content();
    Tensors moment = whole_state(*saved_);
    {
      const ScopedCheckpointProbe probe(probe_of(plan));
      writer_.save(what);
    }
    ++counts_.saves;
    for (int step = 0; step < plan.steps; ++step) train();
    if (plan.ask == Plan::Ask::kNever) {  // the next save() waits for it
      ++counts_.unasked;
      candidates_.emplace_back(what.tag, std::move(moment));
      return;
    }
    const std::string error = plan.ask == Plan::Ask::kFinish ? finish()
                              : writer_.last_failed()        ? kBroken
                                                             : "";
    for (const std::string& theirs : comm_->exchange(error, "outcome"))
      expect(theirs == error, theirs + " and " + error);
    expect(plan.disk == Plan::Disk::kBroken || error.empty(), "a sound disk failed: " + error);
    if (error.empty()) {
      candidates_.clear();
      candidates_.emplace_back(what.tag, std::move(moment));
    } else {
      expect(error.find(kBroken) != std::string::npos, error);
      ++counts_.failed;
    }
    if (!candidates_.empty()) check(plan.load);
  }

  std::string finish() {
    try {
      writer_.finish();
      return "";
    } catch (const CheckpointError& error) {
      return error.what();
    }
  }

  /// `latest` names one of the saves that may have succeeded, and that save is complete.
  void check(bool load) {
    const std::optional<std::string> latest = checkpoint::read_latest(folder_);
    comm_->barrier("all have looked");
    if (!latest) return;  // of candidates nobody asked after, all have failed
    const auto found = std::find_if(candidates_.begin(), candidates_.end(),
                                    [&](const auto& one) { return one.first == *latest; });
    expect(found != candidates_.end(), *latest + " is not what was saved last, " + candidates_.back().first);
    candidates_.erase(candidates_.begin(), found);
    if (!load) return;
    ++counts_.loads;
    if (comm_->rank() == 0) expect(checkpoint::verify(folder_, *latest).ok(), *latest + " is damaged");
    other_->load_checkpoint(folder_);
    expect(bit_equal(whole_state(*other_), candidates_.front().second),
           *latest + " is not what was in memory");
  }

  comm::CommunicatorPtr comm_;
  std::string folder_;
  std::mt19937 random_, own_;  // equal on all ranks; this rank's
  SavedNet model_, other_model_;
  std::unique_ptr<Engine> saved_, other_;
  CheckpointWriter writer_;
  std::vector<std::pair<std::string, Tensors>>
      candidates_;  // the last save known to have succeeded, and those not asked after
  Counts counts_;
};

int soak(int iterations, unsigned seed) {
  const TestFolder folder("async_soak");
  Counts counts;
  on_ranks(kWorld, [&](comm::CommunicatorPtr comm) {
    const Counts mine = Soak(comm, folder.string(), seed).run(iterations);
    if (comm->rank() == 0) counts = mine;
  });
  int num_whole = 0;
  for (const std::string& tag : checkpoint::list_checkpoints(folder.string())) {
    expect(checkpoint::verify(folder.string(), tag).ok(), tag + " is damaged");
    ++num_whole;
  }
  expect(num_whole >= 1, "nothing was saved");
  std::printf(
      "%d asynchronous saves by %d ranks: %d failed, %d not asked after, %d loaded and compared; %d "
      "checkpoints kept\n",
      counts.saves, kWorld, counts.failed, counts.unasked, counts.loads, num_whole);
  return 0;
}

}  // namespace
}  // namespace tessera::testing

int main(int argc, char** argv) {
  try {
    return tessera::testing::soak(argc > 1 ? std::atoi(argv[1]) : 500,
                                  argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

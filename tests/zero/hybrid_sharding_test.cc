// Rows of ranks that hold a copy of the model state each (MiCS), and second copies of the parameters (hpZ):
// the bits, what moves where, and what is held. See [Note: hybrid sharding] in zero/plan/mesh.h.
#include <gtest/gtest.h>

#include <algorithm>

#include "comm/init/given_machine.h"
#include "comm/init/self.h"
#include "comm/torch_dtype.h"
#include "tests/support/watched_communicator.h"
#include "tests/zero/kernels/vectors.h"
#include "zero/plan/mesh.h"

namespace tessera::zero::testing {
namespace {

using tessera::testing::WatchedCommunicator;

constexpr int kNumLayers = 5;

struct Case {
  int world;
  int size;  ///< of a shard group, or of a group that has a second copy
};
std::ostream& operator<<(std::ostream& out, const Case& one) {
  return out << "world " << one.world << " size " << one.size;
}
constexpr Case kCases[] = {{2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}, {6, 2}, {6, 3}};

/// What training leaves: weights and norms, as rank 0 sees them. Every rank has to see the same.
struct Trained {
  std::vector<at::Tensor> weights;
  std::vector<double> norms;
};

struct Training {
  DType dtype = DType::kFloat32;
  int micro_steps = 1;
  kernels::OptimizerKind optimizer = kernels::OptimizerKind::kAdamW;
};

/// Four steps with clipping.
Trained train(const comm::CommunicatorPtr& comm, const Training& training, const Change& change = {}) {
  Chain model(kNumLayers);
  Rig rig(*model, comm, 3, [&](ShardedModelOptions& options) {
    options.compute_dtype = training.dtype;
    options.optimizer.kind = training.optimizer;
    options.optimizer.groups[0].lr = 0.02;
    if (change) change(options);
  });
  Trained trained;
  for (int step = 0; step < 4; ++step) {
    for (int micro = 0; micro < training.micro_steps; ++micro) {
      const at::Tensor input = batch(comm->rank(), step * training.micro_steps + micro);
      rig.backward(model->forward(input.to(to_torch(training.dtype))).to(at::kFloat).square().sum(),
                   micro == 0, micro == training.micro_steps - 1);
    }
    trained.norms.push_back(rig.sharded->summarize_gradients().norm);
    rig.sharded->step(std::min(1.0, 3 / trained.norms.back()));
  }
  trained.weights = rig.weights();
  return trained;
}

/// The result, equal on all ranks. `hosts`: hybrid communication with hosts of so many ranks; 0: the default
/// backend.
Trained train_on(int world, int hosts, const Training& training, const Change& change = {}) {
  std::vector<Trained> of_rank(static_cast<size_t>(world));
  const auto body = [&](comm::CommunicatorPtr comm) {
    of_rank[static_cast<size_t>(comm->rank())] = train(comm, training, change);
  };
  if (hosts == 0) {
    run_ranks(world, body);
  } else {
    const comm::GivenMachine given{.host = [hosts](int rank) { return str(rank / hosts); }};
    comm::run_threads(world, {.backend = "hybrid", .timeout = std::chrono::seconds(20)}, given, body);
  }
  for (const Trained& other : of_rank) {
    EXPECT_TRUE(same_bits(other.weights, of_rank[0].weights));
    EXPECT_EQ(other.norms, of_rank[0].norms);
  }
  return of_rank[0];
}

Change replicas_of(int size) {
  return [size](ShardedModelOptions& options) { options.groups.shard = size; };
}
Change second_copies_of(int size) {
  return [size](ShardedModelOptions& options) { options.groups.secondary = size; };
}

std::vector<Training> trainings() {
  return {{},
          {.dtype = DType::kBFloat16},
          {.optimizer = kernels::OptimizerKind::kLamb},
          {.optimizer = kernels::OptimizerKind::kMuon}};
}

TEST(Mesh, PiecesOfAColumnAreItsShard) {
  for (const Case& one : kCases) {
    SCOPED_TRACE(one);
    const int64_t numel = 24 * one.world;
    std::vector<int> taken(static_cast<size_t>(one.world), 0);
    for (int rank = 0; rank < one.world; ++rank) {
      const Mesh mesh = mesh_of({.shard = one.size}, one.world, rank);
      EXPECT_EQ(mesh.rank_of_owned_part(mesh.owned_part()), rank);
      EXPECT_EQ(taken[static_cast<size_t>(mesh.owned_part())]++, 0);
      EXPECT_EQ(intersect(mesh.owned_of(numel), mesh.shard_of(numel)), mesh.owned_of(numel));
      EXPECT_EQ(mesh.shard_group_ranks()[static_cast<size_t>(mesh.shard())], rank);
      const std::vector<int> group = mesh.replicate_group_ranks();
      EXPECT_EQ(group[static_cast<size_t>(mesh.replica())], rank);
      int64_t begin =
          mesh.shard_of(numel).begin;  // in the order of a reduce-scatter over the replicate group
      for (const int other : group) {
        EXPECT_EQ(mesh_of({.shard = one.size}, one.world, other).owned_of(numel).begin, begin);
        begin += numel / one.world;
      }
    }
  }
}

/// Whether the default backend adds up a shard group, and a replicate group, in the order of ranks. Hybrid
/// communication has two hosts here, and adds up by hosts, which is the order of ranks where the hosts are
/// the shard groups.
bool in_order_of_ranks(const Case& one) {
  return tessera::testing::default_backend() != "hybrid" || one.world == 2 || 2 * one.size == one.world;
}

// Independent of this code: hybrid communication sums by hosts, then over hosts, and has no replicas.
TEST(HybridSharding, RowsGiveTheBitsOfHostsThatAreRows) {
  for (const Case& one : kCases) {
    if (!in_order_of_ranks(one)) continue;
    for (const Training& training : one.world == 4 ? trainings() : std::vector<Training>(1)) {
      SCOPED_TRACE(one);
      const Trained expected = train_on(one.world, one.size, training);
      const Trained trained = train_on(one.world, 0, training, replicas_of(one.size));
      EXPECT_TRUE(same_bits(trained.weights, expected.weights)) << name_of(training.dtype);
      EXPECT_EQ(trained.norms, expected.norms) << name_of(training.dtype);
    }
  }
}

TEST(HybridSharding, OneRowIsStage3) {
  for (const int world : {1, 2, 4}) {
    for (const int micro_steps : {1, 3}) {
      const Training training{.micro_steps = micro_steps};
      const Trained expected = train_on(world, 0, training);
      const Trained trained = train_on(world, 0, training, replicas_of(world));
      EXPECT_TRUE(same_bits(trained.weights, expected.weights)) << world;
      EXPECT_EQ(trained.norms, expected.norms) << world;
    }
  }
}

// Gradients add up in the shard groups, and over the replicas at the end: another order than without, on
// whichever backend.
TEST(HybridSharding, RowsUnderAccumulation) {
  for (const Case& one : {Case{4, 2}, Case{6, 3}}) {
    SCOPED_TRACE(one);
    const Training training{.micro_steps = 3, .optimizer = kernels::OptimizerKind::kSGD};
    const Trained plain = train_on(one.world, 0, training);
    const Trained trained = train_on(one.world, 0, training, replicas_of(one.size));
    EXPECT_LT(largest_difference(trained.weights, plain.weights), 1e-6);
    const Trained on_hosts = train_on(one.world, one.size, training, replicas_of(one.size));
    EXPECT_TRUE(same_bits(trained.weights, on_hosts.weights));
    EXPECT_EQ(trained.norms, on_hosts.norms);
  }
}

TEST(HybridSharding, SecondCopiesChangeNoBit) {
  for (const Case& one : {Case{2, 2}, Case{4, 2}, Case{6, 3}}) {
    for (Training training : one.world == 4 ? trainings() : std::vector<Training>(1)) {
      SCOPED_TRACE(one);
      training.micro_steps = 2;
      const Trained expected = train_on(one.world, 0, training);
      const Trained trained = train_on(one.world, 0, training, second_copies_of(one.size));
      EXPECT_TRUE(same_bits(trained.weights, expected.weights)) << name_of(training.dtype);
      EXPECT_EQ(trained.norms, expected.norms) << name_of(training.dtype);
    }
  }
}

// Sums of small integers are exact, so the reducer's results are known, whatever the order.
TEST(HybridSharding, TheReducersMeanIsThatOfAllRanks) {
  for (const Case& one : kCases) {
    for (const auto& [predivide, prescale] : {std::pair{1.0, false}, {2.0, false}, {1.0, true}}) {
      for (const bool overlap : {true, false}) {
        const bool plain = overlap && predivide == 1 && !prescale;
        if (!plain && (one.world != 4 || one.size == 4)) continue;
        SCOPED_TRACE(one);
        run_ranks(one.world, [&, predivide = predivide, prescale = prescale](comm::CommunicatorPtr comm) {
          StageOptions options = at_stage(3);
          options.mesh = mesh_of({.shard = one.size}, one.world, comm->rank());
          options.predivide_factor = predivide;
          options.prescale = prescale;
          options.overlap = overlap;
          options.num_slots = 1;
          options.replicas = comm->split(options.mesh->replicate_group_ranks(), "replicas");
          if (options.replicas->size() == 1) options.replicas = nullptr;
          const int rank = comm->rank();
          Vectors vectors(4, comm->split(options.mesh->shard_group_ranks(), "shard group"), options);
          for (int step = 0; step < 2; ++step) {
            vectors.backward({1.0 + rank, 2, 3.0 * rank + 1, 0}, {}, /*first=*/true, /*boundary=*/false);
            vectors.backward({4, 2.0 * rank, 0, 0}, {}, false, true);
            EXPECT_TRUE(vectors.hold(
                mean_over_ranks(one.world,
                                [](int r) { return Factors{5.0 + r, 2 + 2.0 * r, 3.0 * r + 1, 0}; }),
                1e-6));
          }
        });
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ what moves

TEST(HybridSharding, OnlyGradientSumsCrossRows) {
  constexpr int kMicroSteps = 3;
  run_ranks(4, [](comm::CommunicatorPtr inner) {
    const auto comm = std::make_shared<WatchedCommunicator>(inner);
    Chain model(kNumLayers);
    Rig rig(*model, comm, 3, replicas_of(2));
    const WatchedCommunicator &shard_group = comm->named("gather"),
                              &replicate_group = comm->named("replicas");
    EXPECT_EQ(shard_group.size(), 2);
    EXPECT_EQ(replicate_group.size(), 2);
    EXPECT_EQ(shard_group.global_rank(0), comm->rank() / 2 * 2) << "neighbours";
    const int num_units = rig.sharded->layout().num_units();
    int64_t unit_bytes = 0;
    for (const UnitSpec& unit : rig.sharded->layout().units()) unit_bytes += 4 * unit.numel;
    for (int step = 0; step < 2; ++step) {
      const tessera::testing::CollectiveCounts before = comm->counts(),
                                               replicate_before = replicate_group.all_counts();
      const int64_t shard_group_gathers = shard_group.counts().all_gathers;
      for (int micro = 0; micro < kMicroSteps; ++micro) {
        EXPECT_EQ(replicate_group.all_counts().bytes, replicate_before.bytes) << "before the boundary";
        rig.backward(model->forward(batch(comm->rank(), micro)).square().sum(), micro == 0,
                     micro == kMicroSteps - 1);
      }
      EXPECT_EQ(comm->counts().bytes, before.bytes) << "forward and backward use no group of all ranks";
      const tessera::testing::CollectiveCounts crossed = replicate_group.all_counts();
      EXPECT_EQ(crossed.reduce_scatters - replicate_before.reduce_scatters, num_units);
      EXPECT_EQ(crossed.all_gathers - replicate_before.all_gathers, num_units);
      EXPECT_EQ(crossed.bytes - replicate_before.bytes, 2 * unit_bytes / 2)
          << "this rank's shards, each reduced and gathered once";
      EXPECT_EQ(replicate_group.counts().broadcasts, comm->rank() % 2 == 0 ? num_units : 0)
          << "the initial values";
      const bool gathered = !rig.sharded->unit(0).placement.host_shared();
      EXPECT_EQ(shard_group.counts().all_gathers > shard_group_gathers, gathered);
      rig.update();
      EXPECT_EQ(comm->counts().all_gathers - before.all_gathers, 1) << "norms and flags";
      EXPECT_EQ(comm->counts().reduce_scatters + comm->counts().all_reduces, 0);
    }
  });
}

TEST(HybridSharding, GathersAfterTheFirstAreOfTheSecondCopy) {
  constexpr int kMicroSteps = 2;
  run_ranks(4, [](comm::CommunicatorPtr inner) {
    const auto comm = std::make_shared<WatchedCommunicator>(inner);
    Chain model(kNumLayers);
    Rig rig(*model, comm, 3, second_copies_of(2));
    const WatchedCommunicator &all = comm->named("gather"), &group = comm->named("gather of the second copy");
    EXPECT_EQ(group.size(), 2);
    const auto by = [](const WatchedCommunicator& one) { return one.counts().all_gathers; };
    const int num_used = kNumLayers;  // `extra` is not
    for (int step = 0; step < 3; ++step) {
      const int64_t before = by(all), before_group = by(group);
      int gathers = 0;
      for (int micro = 0; micro < kMicroSteps; ++micro) {
        rig.backward(model->forward(batch(comm->rank(), micro)).square().sum(), micro == 0,
                     micro == kMicroSteps - 1);
        gathers += rig.num_gathers();
      }
      if (rig.sharded->unit(0).placement.host_shared()) {
        EXPECT_FALSE(rig.sharded->unit(0).placement.second_copy) << "a host's copy needs none";
        EXPECT_EQ(by(group), 0);
      } else if (step > 0) {  // gathers of a recorded order: some of the next pass have been issued already
        EXPECT_GT(by(group) - before_group, num_used * (kMicroSteps - 1));
      }
      rig.update();
      EXPECT_LE(by(all) - before, num_used + rig.residency().num_unsharded()) << gathers;
    }
    if (!rig.sharded->unit(0).placement.host_shared()) {
      EXPECT_GE(by(all), 3 * num_used);
      EXPECT_LE(by(all), 4 * num_used) << "every unit once a step, and once ahead of the next";
      EXPECT_GT(by(group), by(all));
    }
  });
}

TEST(HybridSharding, EvaluationAndFrozenUnitsUseTheSecondCopy) {
  if (tessera::testing::in_shared_memory()) GTEST_SKIP() << "nothing is gathered on use";
  run_ranks(4, [](comm::CommunicatorPtr inner) {
    const auto comm = std::make_shared<WatchedCommunicator>(inner);
    Chain model(kNumLayers), plain(kNumLayers);
    for (auto& parameter : model->layers[1]->parameters()) parameter.set_requires_grad(false);
    Rig rig(*model, comm, 3, second_copies_of(2));
    const WatchedCommunicator& all = comm->named("gather");
    for (int step = 0; step < 2; ++step) rig.step(model->forward(batch(comm->rank(), step)).square().sum());
    const int frozen = rig.sharded->layout().slice(rig.sharded->layout().find("fc1.weight")).unit;
    EXPECT_TRUE(rig.sharded->unit(frozen).secondary_current()) << "its values are never new";
    rig.sharded->eval();
    const at::NoGradGuard no_grad;
    for (int pass = 0; pass < 2; ++pass) {
      const int64_t before = all.counts().all_gathers;
      rig.sharded->begin_forward();
      model->forward(batch(0, 0));
      rig.sharded->end_forward();
      if (pass > 0) {
        EXPECT_EQ(all.counts().all_gathers, before);
      }
    }
  });
}

// ------------------------------------------------------------------------------------------- what is held

TEST(HybridSharding, BytesAreWhatTheFormulaSays) {
  for (const Case& one : kCases) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool replicas : {true, false}) {
        if (dtype != DType::kFloat32 && one.world != 4) continue;
        SCOPED_TRACE(one);
        run_ranks(one.world, [&](comm::CommunicatorPtr comm) {
          Chain model(kNumLayers);
          Rig rig(*model, comm, 3, [&](ShardedModelOptions& options) {
            options.compute_dtype = dtype;
            options.optimizer.kind = kernels::OptimizerKind::kAdamW;
            (replicas ? replicas_of : second_copies_of)(one.size)(options);
          });
          rig.step(model->forward(batch(comm->rank(), 0).to(to_torch(dtype))).square().sum());
          EXPECT_EQ(rig.sharded->measured_bytes(), rig.sharded->formula_bytes());
          int64_t numel = 0;
          for (const UnitSpec& unit : rig.sharded->layout().units()) numel += unit.numel;
          const StateBytes bytes = rig.sharded->measured_bytes();
          const int copy = replicas ? one.size : one.world;
          EXPECT_EQ(bytes.optimizer, 8 * numel / copy);
          EXPECT_EQ(bytes.gradients, 4 * numel / copy);
          EXPECT_EQ(bytes.master, dtype == DType::kFloat32 ? 0 : 4 * numel / copy);
          if (!tessera::testing::in_shared_memory()) {
            EXPECT_EQ(bytes.parameters,
                      size_bytes(dtype) * (numel / copy + (replicas ? 0 : numel / one.size)));
          }
        });
      }
    }
  }
}

// One rank of a thousand holds what it would hold among the others.
TEST(HybridSharding, ASimulatedRankHoldsTheSame) {
  for (const bool replicas : {true, false}) {
    const comm::SimulatedGroup group{.rank = 13, .size = 24, .timeout = std::chrono::seconds(20)};
    Chain model(kNumLayers);
    Rig rig(*model, std::make_shared<comm::SelfCommunicator>(group), 3,
            (replicas ? replicas_of : second_copies_of)(4));
    rig.step(model->forward(batch(0, 0)).square().sum());
    EXPECT_EQ(rig.sharded->measured_bytes(), rig.sharded->formula_bytes());
    int64_t numel = 0;
    for (const UnitSpec& unit : rig.sharded->layout().units()) numel += unit.numel;
    EXPECT_EQ(rig.sharded->measured_bytes().parameters, 4 * (replicas ? numel / 4 : numel / 24 + numel / 4));
  }
}

// ------------------------------------------------------------------------------------------ other writers

TEST(HybridSharding, WritesOfOneRankArriveInAllRowsAndCopies) {
  // Of six ranks on two hosts, over hybrid, the middle shard group shares no memory, and gathers; the others
  // do not.
  const std::vector<std::pair<int, Change>> cases = {
      {4, replicas_of(2)}, {4, second_copies_of(2)}, {6, replicas_of(2)}};
  for (const auto& [world, change] : cases) {
    run_ranks(world, [&, change = change](comm::CommunicatorPtr comm) {
      Chain model(3), plain(3);
      Rig rig(*model, comm, 3, change);
      rig.backward(model->forward(batch(comm->rank(), 0)).square().sum());
      rig.update(/*scale=*/0);
      {
        GatheredParameters gathered(*rig.sharded, {"fc1.weight"}, /*modifier_rank=*/3);
        const at::NoGradGuard no_grad;
        model->layers[1]->weight[2].fill_(comm->rank() == 3 ? 0.25 : 99);
        gathered.close();
      }
      {
        const at::NoGradGuard no_grad;
        plain->layers[1]->weight[2].fill_(0.25);
      }
      const at::Tensor input = batch(0, 1);
      for (int pass = 0; pass < 2; ++pass) {  // from the shards, and from a second copy
        EXPECT_TRUE(at::equal(model->forward(input), plain->forward(input)));
        rig.backward(model->forward(input).square().sum());
        rig.update(/*scale=*/0);
      }
      EXPECT_TRUE(at::equal(rig.sharded->full_parameter("fc1.weight"), plain->layers[1]->weight));
    });
  }
}

}  // namespace
}  // namespace tessera::zero::testing

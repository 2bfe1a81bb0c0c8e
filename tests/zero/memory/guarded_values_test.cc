// What code that reads parameters by raw pointer finds: the model's values, or
// guarded memory; never something in between.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/uio.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <optional>
#include <sstream>
#include <thread>

#include "tests/zero/zero_testing.h"
#include "zero/memory/pause_listening.h"

namespace tessera::zero::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

/// Where the tensor's values are or would be, past libtorch's check of whether they may be read.
char* address_of(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  return static_cast<char*>(storage._mutable_data_ptr_no_checks().get()) +
         tensor.storage_offset() * tensor.element_size();
}

/// The memory behind the tensor, as the kernel sees it; nothing where it may not be read.
std::optional<at::Tensor> raw_values(const at::Tensor& tensor) {
  at::Tensor copy = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
  const iovec local{copy.data_ptr(), static_cast<size_t>(tensor.nbytes())};
  const iovec remote{address_of(tensor), static_cast<size_t>(tensor.nbytes())};
  const ssize_t count = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
  if (count != static_cast<ssize_t>(tensor.nbytes())) return std::nullopt;
  return copy;
}

/// step(), in which rank 1's shards are late; returns at once on the others.
void update_with_rank_1_late(Rig& rig) {
  rig.sharded->summarize_gradients();
  if (rig.sharded->comm().rank() == 1) std::this_thread::sleep_for(milliseconds(60));
  rig.sharded->step(1);
}

TEST(GuardedValues, BetweenAStepAndTheFirstUseNobodyReadsHalfOfIt) {
  for (int stage : {1, 2, 3}) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(str("stage ", stage, " ", name_of(dtype)));
      run_ranks(2, [&](comm::CommunicatorPtr comm) {
        Chain model(4);
        Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) { options.compute_dtype = dtype; });
        const at::ScalarType type = model->layers[0]->weight.scalar_type();
        for (int step = 0; step < 3; ++step) {
          rig.backward(model->forward(batch(comm->rank(), step).to(type)).square().sum());
          update_with_rank_1_late(rig);
          for (const auto& layer : model->layers)
            EXPECT_FALSE(raw_values(layer->weight).has_value()) << "not everybody's values are here";
          const char* const before = address_of(model->layers[3]->weight);
          // The first operator waits, for its own units only; from then on they can be read
          // by raw pointer (stage 3 releases them).
          const at::Tensor found = model->layers[2]->weight.clone();
          EXPECT_EQ(address_of(model->layers[3]->weight), before);
          if (stage < 3) {
            ASSERT_TRUE(raw_values(model->layers[2]->weight).has_value());
            EXPECT_TRUE(at::equal(*raw_values(model->layers[2]->weight), found));
          }
          EXPECT_TRUE(at::equal(found, rig.sharded->full_parameter("fc2.weight").to(type)));
        }
      });
    }
  }
}

/// torch::save of a model reads storages by raw pointer.
std::string saved(const Chain& model) {
  std::ostringstream out;
  torch::save(model, out);
  return out.str();
}

TEST(GuardedValues, ASavedModelIsTheModel) {
  for (int stage : {1, 2, 3}) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      Chain model(3);
      Rig rig(*model, comm, stage);
      rig.backward(model->forward(batch(comm->rank(), 0)).square().sum());
      update_with_rank_1_late(rig);
      std::string bytes;
      {
        const GatheredParameters gathered(*rig.sharded, {});
        bytes = saved(model);
      }
      Chain loaded(3, /*seed=*/9);
      std::istringstream in(bytes);
      torch::load(loaded, in);
      EXPECT_TRUE(same_bits(loaded->parameters(), rig.weights())) << "stage " << stage;
    });
  }
}

TEST(GuardedValues, AModelMayBeSavedOnceItsEngineIsGone) {
  for (int stage : {1, 2}) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      Chain model(3);
      std::vector<at::Tensor> expected;
      {
        Rig rig(*model, comm, stage);
        rig.backward(model->forward(batch(comm->rank(), 0)).square().sum());
        update_with_rank_1_late(rig);
        expected = rig.weights();
        rig.backward(model->forward(batch(comm->rank(), 1)).square().sum());
        update_with_rank_1_late(rig);  // its gathers are under way when the engine goes
      }
      for (const at::Tensor& parameter : model->parameters())
        EXPECT_TRUE(raw_values(parameter).has_value()) << "stage " << stage;
      EXPECT_GT(largest_difference({model->layers[0]->weight}, {expected[0]}), 1e-4);
    });
  }
}

TEST(GuardedValues, SavingAModelTooEarlySaysWhatToDo) {
  run_ranks(2, [](comm::CommunicatorPtr comm) {
    Chain model(2);
    Rig rig(*model, comm, 2);
    rig.backward(model->forward(batch(comm->rank(), 0)).square().sum());
    update_with_rank_1_late(rig);
    try {
      saved(model);
      ADD_FAILURE() << "saved what has not arrived";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  ::testing::ContainsRegex("unit [012] .*still being gathered after step"));
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr("hold a GatheredParameters around raw pointers"));
    }
  });
}

/// A frozen layer between trainable ones.
struct PartlyFrozenImpl : ChainImpl {
  PartlyFrozenImpl() : ChainImpl(3) {
    for (at::Tensor& parameter : layers[1]->parameters()) parameter.set_requires_grad(false);
  }
};
TORCH_MODULE(PartlyFrozen);

// As a checkpoint is loaded: each rank writes what it holds.
TEST(GuardedValues, FrozenUnitsFollowALoad) {
  for (int stage : {0, 1, 2, 3}) {
    for (int64_t persistent : {int64_t{0}, kLinearNumel}) {
      SCOPED_TRACE(str("stage ", stage, " persistent ", persistent));
      run_ranks(2, [&](comm::CommunicatorPtr comm) {
        PartlyFrozen model;
        Rig rig(*model, comm, stage,
                [&](ShardedModelOptions& options) { options.residency.persistence_numel = persistent; });
        for (int step = 0; step < 2; ++step) {
          rig.step(model->forward(batch(comm->rank(), step)).square().sum());
          model->forward(batch(comm->rank(), step));  // every unit has been read, and may be unsharded
          rig.sharded->begin_replacing("the test");
          if (comm->rank() == 1) std::this_thread::sleep_for(milliseconds(40));
          for (int unit = 0; unit < rig.sharded->layout().num_units(); ++unit) {
            const at::NoGradGuard no_grad;
            const PauseListening as_the_loader;
            rig.sharded->unit(unit).local_state().weights.fill_(0.5 + step);
          }
          rig.sharded->end_replacing();
          for (const auto& layer : model->layers)
            EXPECT_TRUE(at::equal(layer->weight.detach().clone(), at::full({kWidth, kWidth}, 0.5 + step)))
                << "trainable: " << layer->weight.requires_grad();
        }
      });
    }
  }
}

}  // namespace
}  // namespace tessera::zero::testing

#include "tests/engine/checkpoint/checkpoint_testing.h"

#include "engine/engine_internal.h"

namespace tessera::testing {

SavedNetImpl::SavedNetImpl(double dropout) : dropout(dropout) {
  table = register_module("table", torch::nn::Embedding(19, 9));
  frozen = register_module("frozen", torch::nn::Linear(9, 9));
  for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  middle = register_module("middle", torch::nn::Linear(9, 9));
  norm = register_module("norm", torch::nn::BatchNorm1d(9));
  sometimes = register_module("sometimes", torch::nn::Linear(9, 9));
  unused = register_module("unused", torch::nn::Linear(5, 31));
  decoder_weight = register_parameter("decoder_weight", table->weight);
}

at::Tensor SavedNetImpl::forward(const at::Tensor& tokens, const at::Tensor& target, bool with_sometimes) {
  at::Tensor h = frozen->forward(table->forward(tokens)).mean(1);
  h = norm->forward(at::dropout(at::tanh(middle->forward(h)), dropout, is_training()));
  if (with_sometimes) h = h + sometimes->forward(h);
  return at::cross_entropy_loss(at::matmul(h, decoder_weight.t()), target);
}

at::Tensor saved_net_loss(SavedNetImpl& model, int64_t step, int rank) {
  const uint64_t seed = 1000 * (rank + 1) + step;
  return model.forward(randint(19, {4, 6}, seed), randint(19, {4}, seed + 500), step % 2 == 1);
}

Trained::Trained(const Job& setup, comm::CommunicatorPtr comm, Logger log) : model(setup.dropout) {
  fill_parameters(*model, setup.seed);
  Case c = small_units(comm->size(), setup.stage);
  c.optimizer = setup.optimizer;
  c.config.zero.unit_numel = setup.unit_numel;
  c.config.bf16 = setup.precision == "bf16";
  c.config.fp16.enabled = setup.precision == "fp16";
  c.config.fp16.loss_scale_window = 3;
  c.config.checkpoint = setup.checkpoint;
  c.config.zero.mics_shard_size = setup.mics_shard_size;
  c.config.zero.hpz_partition_size = setup.hpz_partition_size;
  if (!setup.offload_to.empty() || (setup.transfer && !setup.state_on_device)) {
    c.config.zero.offload_optimizer = {.device = setup.offload_to.empty() ? "cpu" : "nvme",
                                       .nvme_path = setup.offload_to};
    if (setup.stage == 3) c.config.zero.offload_param = c.config.zero.offload_optimizer;
  }
  InitOptions init;
  init.log = log;
  const ScopedHostTransfer transfer(setup.transfer);
  engine = initialize(model, engine_config(c), comm, init);
}

double Trained::step() {
  const at::Tensor loss = saved_net_loss(*model, engine->global_steps(), engine->rank());
  engine->backward(loss);
  engine->step();
  return loss.item<double>();
}

Tensors whole_state(Engine& engine) {
  zero::ShardedModel& model = engine.sharded_model();
  const zero::Layout& layout = model.layout();
  Tensors all = full_parameters(engine);
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    const zero::LocalState mine = model.unit(unit).owned_state();
    const zero::InMemory in_memory(model.unit(unit), zero::kUpdated, zero::InMemory::Access::kRead);
    for (size_t i = 0; i < mine.states.size(); ++i) {
      const at::Tensor by_rank = at::empty({layout.units()[unit].numel}), whole = at::empty_like(by_rank);
      engine.comm().all_gather(by_rank, mine.states[i].contiguous(), "test state")->wait();
      const int64_t numel = mine.range.numel();
      for (int rank = 0; rank < engine.world_size(); ++rank)
        whole.narrow(0, model.mesh().owned_part(rank) * numel, numel)
            .copy_(by_rank.narrow(0, rank * numel, numel));
      for (int parameter : layout.units()[unit].parameters) {
        const zero::UnitSlice& slice = layout.slice(parameter);
        all[str(layout.parameters()[parameter].name, " ", model.optimizer().state_names()[i])] =
            whole.narrow(0, slice.offset, slice.numel).clone();
      }
    }
  }
  for (int parameter = 0; parameter < static_cast<int>(layout.parameters().size()); ++parameter)
    all[layout.parameters()[parameter].name + " steps"] = at::full({1}, model.optimizer().steps(parameter));
  return all;
}

Tensors buffers_of(Engine& engine) {
  Tensors all;
  for (const auto& buffer : engine.sharded_model().buffers()) all[buffer.name] = buffer.tensor.clone();
  return all;
}

}  // namespace tessera::testing

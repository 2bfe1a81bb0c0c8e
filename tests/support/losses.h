// Losses of the models in models.h on fixed batches: `loss(model, step, first, num)`, a LossOf of parity.h.
#pragma once

#include "tests/support/errors.h"
#include "tests/support/parity.h"

namespace tessera::testing {

/// Inputs are given on the device and in the dtype of the model, as Engine::forward would.
inline at::Tensor mlp_loss(MlpImpl& model, int step, int64_t first, int64_t num) {
  const at::Device device = model.fc1->weight.device();
  const at::ScalarType dtype = model.fc1->weight.scalar_type();
  return model.forward(randn({64, 7}, 100 + step).narrow(0, first, num).to(device, dtype),
                       randn({64, 3}, 200 + step).narrow(0, first, num).to(device, dtype));
}

/// The loss of this rank's two samples of a step.
inline at::Tensor step_loss(TypedEngine<MlpImpl>& engine, int step) {
  return mlp_loss(engine.module(), step, 2 * engine.rank(), 2);
}

inline at::Tensor zoo_loss(ZooImpl& model, int step, int64_t first, int64_t num) {
  return model.forward(randint(17, {64, 6}, 300 + step).narrow(0, first, num),
                       randint(4, {64}, 400 + step).narrow(0, first, num));
}

inline at::Tensor odds_loss(OddsImpl& model, int step, int64_t first, int64_t num) {
  return model.forward(randint(19, {64, 6}, 500 + step).narrow(0, first, num),
                       randint(19, {64}, 600 + step).narrow(0, first, num), /*with_sometimes=*/step % 2 == 1);
}

/// Small units and a small cache, so that stage 3 gathers and releases units.
inline Case small_units(int world, int stage) {
  Case c;
  c.world = world;
  c.config.zero.stage = stage;
  c.config.zero.unit_numel = 150;
  c.config.zero.param_persistence_threshold = 0;
  return c;
}

inline std::shared_ptr<TypedEngine<MlpImpl>> mlp_engine(const Case& c, comm::CommunicatorPtr comm,
                                                        const InitOptions& options = {}) {
  Mlp model;
  fill_parameters(*model, 1);
  return initialize(model, engine_config(c), std::move(comm), options);
}

/// `body(comm)` on `world` ranks as threads, with one libtorch thread each.
inline void on_ranks(int world, const std::function<void(comm::CommunicatorPtr)>& body,
                     const std::string& backend = default_backend()) {
  comm::run_threads(world, {.backend = backend, .timeout = std::chrono::seconds(60)},
                    [&](comm::CommunicatorPtr comm) {
                      at::set_num_threads(1);
                      body(std::move(comm));
                    });
}

}  // namespace tessera::testing

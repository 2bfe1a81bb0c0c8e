// One rank as a process of its own, for process_test: trains at every stage and checks the outcome itself.
//   engine_test_rank parity    against a plain loop on the global batch
//   engine_test_rank dropout   against itself, stage by stage, with a random generator of its own
//   engine_test_rank rows      mics_shard_size 2 on hosts of 2 ranks, against stage 3 without it; and resumed
// Exit code 0 when everything agrees; otherwise the differences are on stderr, and the exit code is 1.
#include <iostream>
#include <optional>

#include "comm/init/given_machine.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "engine/checkpointing.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

int failures = 0;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::cerr << what << std::endl;
  ++failures;
}

void check_parity(const comm::CommunicatorPtr& comm) {
  for (int stage = 0; stage <= 3; ++stage) {
    Case c = small_units(comm->size(), stage);
    c.accumulation = 2;
    c.clipping = 0.05;
    const TrainingRun plain = plain_run<Zoo>(c, zoo_loss), run = rank_run<Zoo>(c, comm, zoo_loss);
    for (size_t step = 0; step < plain.losses.size(); ++step) {
      expect(std::abs(run.losses[step] - plain.losses[step]) < 1e-5,
             str("stage ", stage, " loss at step ", step));
      expect(largest_difference(run.gradients[step], plain.gradients[step]) < 1e-5,
             str("stage ", stage, " gradients at step ", step));
    }
    expect(largest_difference(run.weights, plain.weights) < 1e-5, str("stage ", stage, " weights"));
  }
}

at::Tensor dropout_loss(DropoutNetImpl& model, int step, int64_t first, int64_t num) {
  return model.forward(randn({16, 7}, step).narrow(0, first, num),
                       randn({16, 3}, 50 + step).narrow(0, first, num));
}

void check_dropout(const comm::CommunicatorPtr& comm) {
  std::vector<TrainingRun> runs;
  for (int stage = 0; stage <= 3; ++stage) {
    at::manual_seed(100 + comm->rank());
    runs.push_back(rank_run<DropoutNet>(small_units(comm->size(), stage), comm, dropout_loss));
    if (comm->size() > 2) continue;  // beyond two ranks Gloo chooses the order of a sum
    expect(runs[stage].losses == runs[0].losses, str("stage ", stage, " losses differ from stage 0's"));
    expect(bit_equal(runs[stage].weights, runs[0].weights),
           str("stage ", stage, " weights differ from stage 0's"));
  }
}

/// Sums by hosts have the order of sums by rows.
void check_bits_of_rows(const comm::CommunicatorPtr& comm) {
  Case c = small_units(comm->size(), 3), rows = c;
  rows.config.zero.mics_shard_size = 2;
  const TrainingRun expected = rank_run<Zoo>(c, comm, zoo_loss), run = rank_run<Zoo>(rows, comm, zoo_loss);
  expect(run.losses == expected.losses, "losses differ from stage 3's");
  expect(run.norms == expected.norms, "norms differ from stage 3's");
  expect(bit_equal(run.weights, expected.weights), "weights differ from stage 3's");
}

/// Ranks write files of other numbers than their own: each has to find its own random numbers again.
void check_resumed_rows(const comm::CommunicatorPtr& comm) {
  std::optional<TemporaryFolder> mine;
  if (comm->rank() == 0) mine.emplace("tessera_rows");
  const std::string folder = comm->exchange(mine ? mine->path().string() : "", "folder").front();
  Case c = small_units(comm->size(), 3);
  c.config.zero.mics_shard_size = 2;
  at::manual_seed(100 + comm->rank());
  DropoutNet model;
  fill_parameters(*model, 1);
  const auto engine = initialize(model, engine_config(c), comm);
  const auto train = [&] {
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = dropout_loss(*model, step, first_sample(c, 0, comm->rank()), c.micro_batch);
      engine->backward(loss);
      engine->step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  train();
  engine->save_checkpoint(folder);
  const std::vector<double> went_on = train();
  engine->load_checkpoint(folder);
  expect(train() == went_on, "losses after loading differ");
  comm->barrier("done");
}

}  // namespace
}  // namespace tessera::testing

int main(int argc, char** argv) try {
  using namespace tessera;
  at::set_num_threads(1);
  const std::string what = argc > 1 ? argv[1] : "";
  const comm::JoinOptions options{.timeout = std::chrono::seconds(60)};
  comm::GivenMachine given;
  if (what == "rows") given.host = [](int rank) { return str("host ", rank / 2); };
  const auto comm = comm::join(options, comm::environment(), given);
  if (what == "parity") {
    testing::check_parity(comm);
  } else if (what == "dropout") {
    testing::check_dropout(comm);
  } else if (what == "rows") {
    testing::check_bits_of_rows(comm);
    testing::check_resumed_rows(comm);
  } else {
    throw Error("expected parity, dropout or rows, found '" + what + "'");
  }
  return testing::failures == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << std::endl;
  return 1;
}

// One rank as a process of its own, for process_test: trains at every stage and checks the outcome itself.
//   engine_test_rank parity    against a plain loop on the global batch
//   engine_test_rank dropout   against itself, stage by stage, with a random generator of its own
// Exit code 0 when everything agrees; otherwise the differences are on stderr, and the exit code is 1.
#include <iostream>

#include "core/error.h"
#include "core/str.h"
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

void check_dropout(const comm::CommunicatorPtr& comm) {
  std::vector<TrainingRun> runs;
  for (int stage = 0; stage <= 3; ++stage) {
    at::manual_seed(100 + comm->rank());
    runs.push_back(rank_run<DropoutNet>(small_units(comm->size(), stage), comm,
                                        [](DropoutNetImpl& model, int step, int64_t first, int64_t num) {
                                          return model.forward(
                                              randn({16, 7}, step).narrow(0, first, num),
                                              randn({16, 3}, 50 + step).narrow(0, first, num));
                                        }));
    if (comm->size() > 2) continue;  // beyond two ranks Gloo chooses the order of a sum
    expect(runs[stage].losses == runs[0].losses, str("stage ", stage, " losses differ from stage 0's"));
    expect(bit_equal(runs[stage].weights, runs[0].weights),
           str("stage ", stage, " weights differ from stage 0's"));
  }
}

}  // namespace
}  // namespace tessera::testing

int main(int argc, char** argv) try {
  using namespace tessera;
  at::set_num_threads(1);
  const auto comm = comm::join({.timeout = std::chrono::seconds(60)});
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "parity") {
    testing::check_parity(comm);
  } else if (what == "dropout") {
    testing::check_dropout(comm);
  } else {
    throw Error("expected parity or dropout, found '" + what + "'");
  }
  return testing::failures == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << std::endl;
  return 1;
}

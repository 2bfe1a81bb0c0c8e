// One rank as a process of its own, for process_test: trains with all state on disk, and may be killed.
//   deferred_update_rank FOLDER STAGE KILL_AT
// Goes on from FOLDER's checkpoint if there is one; a save every two steps. KILL_AT: the last rank kills
// itself at that operator after the first save, 0 never. At the end rank 0 writes FOLDER/result (parameters
// and optimizer states), and the last rank FOLDER/operators: how many there were after the first save.
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "comm/init/init.h"
#include "core/error.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"

namespace tessera::testing {
namespace {

constexpr int64_t kSteps = 6, kSaveEvery = 2;

std::atomic<int64_t> operators{0}, kill_at{0};

std::unique_ptr<at::ObserverContext> count(const at::RecordFunction&) {
  if (++operators == kill_at) ::raise(SIGKILL);
  return nullptr;
}

void train(const std::string& folder, int stage, int64_t kill_at_operator,
           const comm::CommunicatorPtr& comm) {
  Trained trained({.world = comm->size(), .stage = stage, .offload_to = folder + "/disk"}, comm);
  if (std::filesystem::exists(folder + "/checkpoints"))
    trained.engine->load_checkpoint(folder + "/checkpoints");
  const bool last = comm->rank() == comm->size() - 1;
  while (trained.engine->global_steps() < kSteps) {
    if (last && trained.engine->global_steps() == kSaveEvery) {
      kill_at = kill_at_operator;
      at::addGlobalCallback(at::RecordFunctionCallback(&count));
    }
    trained.step();
    if (trained.engine->global_steps() % kSaveEvery == 0)
      trained.engine->save_checkpoint(folder + "/checkpoints");
  }
  if (last) std::ofstream(folder + "/operators") << operators;
  const Tensors state = whole_state(*trained.engine);
  if (comm->rank() != 0) return;
  std::ofstream result(folder + "/result", std::ios::binary);
  for (const auto& [name, tensor] : state) {
    const at::Tensor values = tensor.contiguous();
    result << name << '\n';
    result.write(static_cast<const char*>(values.const_data_ptr()),
                 static_cast<std::streamsize>(values.nbytes()));
  }
}

}  // namespace
}  // namespace tessera::testing

int main(int argc, char** argv) try {
  using namespace tessera;
  if (argc != 4) throw Error("expected FOLDER STAGE KILL_AT");
  at::set_num_threads(1);
  const auto comm = comm::join({.timeout = std::chrono::seconds(60)});
  testing::train(argv[1], std::stoi(argv[2]), std::stoll(argv[3]), comm);
  return 0;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << std::endl;
  return 1;
}

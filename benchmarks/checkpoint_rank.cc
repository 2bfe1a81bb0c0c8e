// One rank that trains a GPT for two steps, then saves and loads a few times;
// rank 0 prints seconds as one JSON line.
//   tessera launch -n 2 -- checkpoint_rank DIR 33m|110m STAGE fsync|nosync|async REPEATS
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/consolidate/convert_checkpoint.h"
#include "comm/init/init.h"
#include "core/files/disk.h"
#include "core/str.h"
#include "engine/checkpointing.h"
#include "engine/config/parse.h"
#include "engine/engine.h"
#include "examples/language_model/model.h"

namespace tessera::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Seconds from one barrier to the next: the slowest rank's.
template <class Body>
double timed(comm::Communicator& comm, const Body& body) {
  comm.barrier("before");
  const auto start = Clock::now();
  body();
  comm.barrier("after");
  return seconds_since(start);
}

/// Every rank writes a plain file as large as its part of the checkpoint, with or without fsync.
double write_plainly(comm::Communicator& comm, const std::string& directory, int64_t bytes, bool sync) {
  const std::vector<std::byte> data(static_cast<size_t>(bytes), std::byte{7});
  const std::string path = str(directory, "/plain_", comm.rank());
  const double seconds = timed(comm, [&] {
    const Disk disk({.sync = sync, .probe = {}});
    OutputFile file = disk.create(path);
    file.write_at(0, data);
    file.close();
  });
  std::filesystem::remove(path);
  return seconds;
}

void run(const std::string& directory, const std::string& size, int stage, const std::string& mode,
         int repeats) {
  at::set_num_threads(1);
  const auto comm = comm::join();
  const GptOptions shape = size == "110m"  // as peer.py has them
                               ? GptOptions{.dim = 768, .layers = 12, .heads = 12, .vocabulary = 16384}
                               : GptOptions{.dim = 512, .layers = 8, .heads = 8, .vocabulary = 8192};
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 1;
  config.optimizer.options = AdamWOptions{.lr = 1e-3};
  config.zero.stage = stage;
  config.checkpoint.async = mode == "async";
  config.checkpoint.fsync = mode == "fsync";
  config.checkpoint.keep_last = 1;
  at::manual_seed(1);
  Gpt model(shape);
  auto engine = initialize(model, config, comm);
  const auto step = [&] {
    const at::Tensor tokens = at::randint(shape.vocabulary, {1, shape.sequence}, at::kLong);
    engine->backward(engine->forward(tokens, tokens));
    engine->step();
  };
  step();
  step();
  std::filesystem::create_directories(directory);
  std::vector<double> save, load, plain, consolidated;
  int64_t rank_bytes =
      engine->sharded_model().measured_bytes().total() * 3 / 4 / (stage == 0 ? comm->size() : 1);
  for (int i = 0; i < repeats; ++i) {
    if (mode == "async") {
      step();  // while the last one is written
      engine->finish_checkpoint();
    }
    save.push_back(timed(*comm, [&] { engine->save_checkpoint(directory, str("save", i)); }));
    engine->finish_checkpoint();
    comm->barrier("saved");
    rank_bytes =
        static_cast<int64_t>(std::filesystem::file_size(str(directory, "/save", i, "/rank_00000.h5")));
    load.push_back(timed(*comm, [&] { engine->load_checkpoint(directory); }));
    plain.push_back(write_plainly(*comm, directory, rank_bytes, mode == "fsync"));
    consolidated.push_back(timed(*comm, [&] {
      if (comm->rank() != 0) return;
      checkpoint::ConvertOptions options{.target = checkpoint::ConvertTarget::kSafetensors};
      options.directory = directory;
      options.output = directory + "/model.safetensors";
      options.disk.sync = false;
      checkpoint::convert_checkpoint(options);
    }));
  }
  if (comm->rank() != 0) return;
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(str(directory, "/save", repeats - 1)))
    bytes += static_cast<int64_t>(entry.file_size());
  nlohmann::json out{{"save_s", save},
                     {"load_s", load},
                     {"plain_write_s", plain},
                     {"consolidate_s", consolidated},
                     {"bytes", bytes}};
  std::cout << out.dump() << std::endl;
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) try {
  if (argc != 6) throw tessera::Error("usage: checkpoint_rank DIR 33m|110m STAGE fsync|nosync|async REPEATS");
  tessera::benchmarks::run(argv[1], argv[2], std::stoi(argv[3]), argv[4], std::stoi(argv[5]));
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}

#include "benchmarks/rank.h"

#include <ATen/Parallel.h>

#include <iostream>
#include <sstream>
#include <string>

#include "core/memory/process_memory.h"

namespace tessera::benchmarks {
namespace {

constexpr int kWarmUpSteps =
    3;  // the first records the order of use, the second allocates what replaying needs
constexpr double kMb = 1e6;

}  // namespace

void serve(const Task& task) {
  at::set_num_threads(1);
  const std::unique_ptr<Trainee> trainee = make_trainee(task);
  for (int i = 0; i < kWarmUpSteps; ++i) trainee->step();
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string request;
    int num_steps = 0;
    words >> request >> num_steps;
    if (request == "footprint") {
      std::cout << peak_resident_bytes() / kMb << ' ' << static_cast<double>(trainee->state_bytes()) / kMb
                << ' ' << static_cast<double>(trainee->num_parameters());
    }
    for (int i = 0; i < num_steps; ++i) {
      const StepTimes times = trainee->step();
      std::cout << times.step_s << ' ' << times.forward_s << ' ' << times.backward_s << ' ' << times.update_s
                << ' ' << times.cpu_s << ' ';
    }
    std::cout << std::endl;
  }
}

}  // namespace tessera::benchmarks

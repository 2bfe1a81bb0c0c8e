#include "benchmarks/rank.h"

#include <ATen/Parallel.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

namespace tessera::benchmarks {
namespace {

constexpr int kWarmUpSteps = 3;  // the first records the order of use, the second allocates what replaying needs
constexpr double kMb = 1e6;

/// Of this process, in bytes.
double peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return 1024 * std::stod(line.substr(6));
  }
  return 0;
}

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
      std::cout << peak_resident_bytes() / kMb << ' ' << static_cast<double>(trainee->state_bytes()) / kMb << ' '
                << static_cast<double>(trainee->num_parameters());
    }
    for (int i = 0; i < num_steps; ++i) {
      const StepTimes times = trainee->step();
      std::cout << times.step_s << ' ' << times.forward_s << ' ' << times.backward_s << ' ' << times.update_s << ' '
                << times.cpu_s << ' ';
    }
    std::cout << std::endl;
  }
}

}  // namespace tessera::benchmarks

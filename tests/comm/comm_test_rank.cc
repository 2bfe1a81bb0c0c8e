// One rank as a process of its own, for the tests that kill, delay or mislead ranks:
//   comm_test_rank sum       joins, adds up once, prints "sum S backend B"
//   comm_test_rank loop      adds up until something fails; prints "running" after the first time
//   comm_test_rank exchange  exchanges texts many times, then leaves at once
//   comm_test_rank fail      joins, then rank 1 ends by an error of its own while the others add up
// TEST_RENDEZVOUS_MS and TEST_TIMEOUT_MS set the timeouts, TEST_BACKEND the backend. A tessera::Error is printed as "error: LINE"; exit
// code 3.
#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "comm/init.h"
#include "core/error.h"
#include "core/str.h"

namespace {

using tessera::comm::CommunicatorPtr;

std::chrono::milliseconds setting(const char* name, int fallback) {
  const char* value = std::getenv(name);
  return std::chrono::milliseconds(value != nullptr ? std::atoi(value) : fallback);
}

void say(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

void add_up(const CommunicatorPtr& comm, const at::Tensor& buffer) {
  comm->all_reduce(buffer, "numbers")->wait();
}

void run(const std::string& scenario, const CommunicatorPtr& comm) {
  at::Tensor buffer = at::ones({1 << 16});
  if (scenario == "sum") {
    add_up(comm, buffer);
    say(tessera::str("sum ", buffer[0].item<float>(), " backend ", comm->backend()));
  } else if (scenario == "loop") {
    for (bool first = true;; first = false) {
      add_up(comm, buffer.fill_(1));
      if (first) say("running");
    }
  } else if (scenario == "exchange") {
    for (int i = 0; i < 50; ++i) {
      const auto values = comm->exchange(tessera::str(comm->rank(), "/", i), "texts");
      for (int r = 0; r < comm->size(); ++r) {
        if (values[static_cast<size_t>(r)] != tessera::str(r, "/", i)) throw std::logic_error("wrong value");
      }
    }
    say("exchanged");
  } else if (scenario == "exchange_loop") {
    for (bool first = true;; first = false) {
      comm->exchange("", "texts");
      if (first) say("running");
    }
  } else if (scenario == "fail") {
    if (comm->rank() == 1) throw tessera::DataError("data/train: truncated");
    add_up(comm, buffer);
  } else {
    throw std::logic_error("unknown scenario " + scenario);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    tessera::comm::Options options;
    if (const char* backend = std::getenv("TEST_BACKEND")) options.backend = backend;
    options.timeout = setting("TEST_TIMEOUT_MS", 60000);
    options.rendezvous_timeout = setting("TEST_RENDEZVOUS_MS", 30000);
    run(argc > 1 ? argv[1] : "sum", tessera::comm::connect(tessera::comm::environment(), options));
  } catch (const tessera::Error& error) {
    say(std::string("error: ") + error.what());
    return 3;
  }
  return 0;
}

// Ranks as forks of one process that has loaded libtorch: a program of its own takes a quarter of a second of
// a core to start. A test process asks `comm_test_rank serve` for them over a socket.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace tessera::comm::testing {

/// Of `comm_test_rank serve`.
inline constexpr int kServerSocket = 3;

struct RankRequest {
  std::vector<std::string> arguments;
  std::map<std::string, std::string> variables;  // the whole environment
};

/// `output` becomes the rank's stdout and stderr. The answer: the rank's pid, then a byte once it is an
/// orphan, which its subreaper (prctl(2)), the test process, can wait for.
void send_request(int socket, const RankRequest& request, int output);

/// Forks ranks until the socket is closed, and then ends the process. Returns in each rank, with its
/// arguments; the environment and the descriptors are the request's then.
std::vector<std::string> serve_ranks();

}  // namespace tessera::comm::testing

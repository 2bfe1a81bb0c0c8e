#include "core/environment.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "core/error.h"
#include "core/str.h"

namespace tessera {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

/// All of `text`.
template <class Number>
std::optional<Number> parse(const std::string& text) {
  Number value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

std::chrono::milliseconds parse_seconds(const char* name, const std::string& text) {
  constexpr double kMost_s = 1e6;
  const std::optional<double> seconds = parse<double>(text);
  if (!seconds || !(*seconds > 0 && *seconds <= kMost_s))
    throw CommError(str(name, "='", text, "': expected seconds, above 0 and at most ", kMost_s));
  return std::chrono::milliseconds(std::max<int64_t>(1, std::llround(*seconds * 1e3)));
}

int optional(const char* name, int fallback, int least, int most) {
  const auto text = variable(name);
  if (!text) return fallback;
  const std::optional<int> value = parse<int>(*text);
  if (!value) throw CommError(str(name, "='", *text, "' is not an integer"));
  if (*value < least || *value > most)
    throw CommError(str(name, "=", *value, " is out of range: expected ", least, " to ", most));
  return *value;
}

int required(const char* name, const char* because, int least, int most) {
  if (!variable(name)) throw CommError(str(name, " is not set although ", because));
  return optional(name, 0, least, most);
}

constexpr int kMost = 1 << 20;  ///< ranks, restarts: anything above is a mistake

void read_local(Environment& env) {
  if (!variable("LOCAL_RANK") && !variable("LOCAL_WORLD_SIZE")) {  // a single host
    env.local_rank = env.rank;
    env.local_world_size = env.world_size;
    return;
  }
  env.local_world_size = optional("LOCAL_WORLD_SIZE", env.world_size, 1, env.world_size);
  env.local_rank = required("LOCAL_RANK", "LOCAL_WORLD_SIZE is", 0, env.local_world_size - 1);
}

void read_rendezvous(Environment& env) {
  const auto address = variable("MASTER_ADDR");
  if (!address)
    throw CommError("MASTER_ADDR is not set although WORLD_SIZE is above 1: the address of rank 0's host");
  if (address->empty()) throw CommError("MASTER_ADDR is empty: expected the address of rank 0's host");
  env.master_addr = *address;
  env.master_port = required("MASTER_PORT", "WORLD_SIZE is above 1", 1, 65535);
  // torch compares with exactly this.
  env.agent_store = variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  env.restart_count = optional("TORCHELASTIC_RESTART_COUNT", 0, 0, kMost);
  if (const auto seconds = variable("TESSERA_RENDEZVOUS_TIMEOUT_S"))
    env.rendezvous_timeout = parse_seconds("TESSERA_RENDEZVOUS_TIMEOUT_S", *seconds);
  if (env.rank == 0 && !env.agent_store) env.store_fd = optional("TESSERA_STORE_FD", -1, 0, kMost);
}

}  // namespace

Environment environment() {
  Environment env;
  const char* first_set = nullptr;
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    if (first_set == nullptr && variable(name)) first_set = name;
  }
  if (first_set == nullptr) return env;
  const std::string because = str(first_set, " is");
  env.world_size = required("WORLD_SIZE", because.c_str(), 1, kMost);
  env.rank = required("RANK", because.c_str(), 0, env.world_size - 1);
  read_local(env);
  if (env.world_size > 1) read_rendezvous(env);
  return env;
}

bool in_group() { return variable("RANK") && variable("WORLD_SIZE"); }

std::optional<int> integer_variable(const char* name) { return parse<int>(variable(name).value_or("")); }

}  // namespace tessera

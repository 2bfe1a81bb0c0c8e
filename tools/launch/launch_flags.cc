#include "tools/launch/launch_flags.h"

#include <cstdlib>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/parse_number.h"
#include "core/str.h"
#include "core/variables.h"
#include "launcher/environment/environment.h"

namespace tessera::tools {
namespace {

constexpr int kMaxSeconds = 86400;
constexpr int kMostOfRun_s = 100 * 86400;  // of --timeout

/// The first long name of "-n,--nproc,--nproc-per-node".
std::string name_of(const std::string& names) {
  const size_t begin = names.find("--");
  return names.substr(begin, names.find(',', begin) - begin);
}

/// `part`: of `text`, what the user has written. CLI11's own numbers take "" for no value, and its errors
/// name neither what was found nor what is accepted.
template <class Number>
Number read_number(const std::string& name, const std::string& text, std::string_view part,
                   const std::string& expected) {
  if (const auto value = parse_number<Number>(part)) return *value;
  throw ConfigError(name, " ", text.empty() ? "''" : text, ": expected ", expected);
}

/// `Target`: int or optional<int>.
template <class Target>
void add_number(CLI::App& command, const std::string& names, const char* type_name,
                const std::string& expected, Target& target, const std::string& description) {
  const auto store = [name = name_of(names), expected, &target](const std::string& text) {
    target = read_number<int>(name, text, text, expected);
  };
  command.add_option_function<std::string>(names, store, description)->type_name(type_name);
}

void add_seconds(CLI::App& command, const std::string& names, int most, double& target,
                 const std::string& description) {
  const auto store = [name = name_of(names), most, &target](const std::string& text) {
    const std::string expected = str("seconds from 0 to ", most);
    const auto value = read_number<double>(name, text, text, expected);
    if (!(value >= 0 && value <= most)) throw ConfigError(name, " ", text, ": expected ", expected);
    target = value;
  };
  command.add_option_function<std::string>(names, store, description)->type_name("S");
}

/// "4", or "2:4" with `fewest`, unless that is null.
void add_count(CLI::App& command, const std::string& names, const char* of_what, std::optional<int>& most,
               int* fewest, const std::string& description) {
  const auto store = [name = name_of(names), of_what, &most, fewest](const std::string& text) {
    const std::string expected = str("1 to ", launcher::kMaxRanks, " ", of_what);
    const std::string_view all = text;
    const size_t colon = fewest != nullptr ? all.find(':') : all.npos;
    most = read_number<int>(name, text, colon == all.npos ? all : all.substr(colon + 1), expected);
    if (*most < 1 || *most > launcher::kMaxRanks) throw ConfigError(name, " ", text, ": expected ", expected);
    if (fewest == nullptr) return;
    *fewest = colon == all.npos ? 0 : read_number<int>(name, text, all.substr(0, colon), expected);
    if (colon != all.npos && (*fewest < 1 || *fewest > *most))
      throw ConfigError(name, " ", text, ": expected MIN:MAX with 1 <= MIN <= MAX");
  };
  command.add_option_function<std::string>(names, store, description)->type_name("N");
}

void add_text(CLI::App& command, const std::string& names, const char* type_name, std::string& target,
              const std::string& description) {
  command.add_option(names, target, description)->type_name(type_name);
}

void add_place_flags(CLI::App& command, LaunchFlags& flags) {
  add_count(command, "-n,--nproc,--nproc-per-node,--nproc_per_node,--num_gpus,--num_accelerators", "ranks",
            flags.nproc, nullptr, "Ranks to start on each host");
  add_count(command, "--nnodes,--num_nodes", "hosts", flags.num_nodes, &flags.fewest_nodes,
            "Hosts; with --hostfile the first N of it (default: 1); MIN:MAX: after a failure as few as MIN");
  add_number(command, "--node-rank,--node_rank", "I", "0 to the number of hosts less 1", flags.node_rank,
             "This host's number, where each is started by hand");
  // Where mpirun has started this process, the variable says what mpirun does not
  // (core/environment/environment.h). A rank has it from its launcher.
  command
      .add_option_function<std::string>(
          "--master-addr,--master_addr",
          [&flags](const std::string& text) {
            flags.master_addr = text;
            if (!text_variable("RANK")) ::setenv("MASTER_ADDR", text.c_str(), /*overwrite=*/1);
          },
          "Address of host 0 (default: this host, or the first of the hostfile)")
      ->type_name("HOST");
  add_number(command, "--master-port,--master_port", "PORT", "1 to 65535, or 0 for a free port",
             flags.master_port, "Port of the rendezvous (default: a free one; 29500 with --node-rank)");
}

void add_cluster_flags(CLI::App& command, LaunchFlags& flags) {
  add_text(command, "-H,--hostfile", "FILE", flags.hostfile, "Hosts to start ranks on: lines HOST slots=N");
  add_text(command, "-i,--include", "HOSTS", flags.include,
           "Only these hosts and slots of the hostfile: host1@host2:0,2");
  add_text(command, "-e,--exclude", "HOSTS", flags.exclude, "All but these");
  add_text(command, "--launcher", "NAME", flags.launcher,
           "What starts them there: local, ssh, pdsh, openmpi or slurm (default: ssh with --hostfile, else "
           "local)");
  add_text(command, "--launcher-args,--launcher_args", "ARGS", flags.launcher_args,
           "More arguments for that program, in one word");
  add_number(command, "--ssh-port,--ssh_port", "PORT", "1 to 65535", flags.ssh_port,
             "Port of sshd on the hosts");
}

void add_rank_flags(CLI::App& command, LaunchFlags& flags) {
  command
      .add_option_function<std::string>(
          "--env-file,--env_file", [&flags](const std::string& text) { flags.env_files.push_back(text); },
          "Environment variables for the ranks: lines NAME=VALUE; may be given several times")
      ->trigger_on_parse()
      ->type_name("FILE");
  add_text(command, "--log-dir,--log_dir,--enable_each_rank_log", "DIR", flags.log_dir,
           "Folder for the output of ranks 1 and above (default: a temporary one, kept if it says more "
           "about a failure than was printed)");
  command
      .add_option("-t,--tee", flags.tee,
                  "Show the output of all ranks, with the rank before each line, and log it (0:3,1:3 shows "
                  "ranks 0 and 1 of each host)")
      ->expected(0, 1)
      ->default_str("3")  // --tee without a value
      ->option_text("[RANKS]");
  command.add_flag("--bind-cores,--bind_cores_to_rank", flags.bind_cores,
                   "Each rank on cores of its own, within one NUMA node where that can be");
  add_text(command, "--bind-core-list,--bind_core_list", "CORES", flags.core_list,
           "The cores to share: 0-3,8 (default: all)");
  add_number(command, "--max-restarts,--max_restarts", "N", "0 to 1000000 restarts", flags.max_restarts,
             "How often all ranks are started again after one has failed (default: 0; with MIN:MAX the "
             "difference)");
  add_seconds(command, "--timeout", kMostOfRun_s, flags.timeout_s,
              "Seconds until the run is asked to save and end; the exit code is then 124");
  add_seconds(command, "--save-grace", kMaxSeconds, flags.save_grace_s,
              "Seconds ranks have to end after Ctrl-C or SIGTERM (default: 30)");
  add_text(command, "--signals-to-handle,--signals_to_handle", "SIGNALS", flags.signals_to_handle,
           "Signals that ranks get as they are and then have --save-grace to end, as torchrun's, besides "
           "SIGTERM and SIGINT: SIGUSR1,SIGUSR2 (default: ranks get these two and go on)");
}

}  // namespace

void add_launch_flags(CLI::App& command, LaunchFlags& flags) {
  add_place_flags(command, flags);
  add_cluster_flags(command, flags);
  add_rank_flags(command, flags);
  // Ranks inherit the variable; this process reads it too if it is a rank.
  command
      .add_option_function<std::string>(
          "--rendezvous-timeout,--rendezvous_timeout",
          [&flags](const std::string& text) {
            const auto seconds = parse_number<double>(text);
            if (!seconds || !(*seconds > 0 && *seconds <= kMaxSeconds))
              throw ConfigError("--rendezvous-timeout ", text.empty() ? "''" : text,
                                ": expected seconds above 0, at most ", kMaxSeconds);
            ::setenv("TESSERA_RENDEZVOUS_TIMEOUT_S", text.c_str(), /*overwrite=*/1);
            flags.rendezvous_timeout = text;
          },
          "Seconds ranks wait for each other when they meet (default: 300)")
      ->type_name("S");
}

}  // namespace tessera::tools

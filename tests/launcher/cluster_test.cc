// Runs on several hosts, with a stand-in for ssh that runs the command here. The real ssh, pdsh, mpirun and
// srun are in tests/hosts.
#include "launcher/cluster.h"

#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <set>

#include "core/str.h"
#include "tests/launcher/launch_testing.h"
#include "tests/support/errors.h"

namespace tessera::launcher {
namespace {

using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ClusterTest : public LaunchTest {
 protected:
  void SetUp() override {
    LaunchTest::SetUp();
    std::filesystem::create_directory(folder_.path("bin"));
    // Its options, `--`, the host, and the command, whose text comes by standard input.
    std::ofstream(folder_.path("bin/ssh"))
        << "#!/bin/sh\n"
           "echo \"$@\" >> '"
        << folder_.path("ssh_args")
        << "'\n"
           "while [ \"$1\" != -- ]; do shift; done\n"
           "case $2 in unreachable) echo 'ssh: no route' >&2; exit 255;; esac\n"
           "case $2 in bare) rmdir '"
        << folder_.path("work")
        << "';; esac\n"
           "host=$2; shift 2\n"
           "if [ $host != stopped ]; then exec \"$@\"; fi\n"
           "\"$@\" | (while [ ! -e '"
        << folder_.path("said_0") << "' ]; do sleep 0.05; done)\n";
    ::chmod(folder_.path("bin/ssh").c_str(), 0755);
  }

  std::string hostfile(const std::string& content) {
    std::ofstream(folder_.path("hosts")) << content;
    return folder_.path("hosts");
  }
  std::vector<std::string> args(const std::string& hosts, const std::vector<std::string>& action,
                                const std::vector<std::string>& flags = {}) {
    std::vector<std::string> all = {"launch", "--hostfile", hostfile(hosts), "--master-addr", "127.0.0.1"};
    all.insert(all.end(), flags.begin(), flags.end());
    for (const char* word : {"--", TEST_RANK}) all.emplace_back(word);
    all.push_back(folder_.path());
    all.insert(all.end(), action.begin(), action.end());
    return all;
  }
  std::vector<std::string> path() const {
    return {"PATH=" + folder_.path("bin") + ":" + std::getenv("PATH")};
  }
  int run_on(const std::string& hosts, const std::vector<std::string>& action,
             const std::vector<std::string>& flags = {}) {
    Tool tool(folder_, args(hosts, action, flags), path());
    return tool.wait();
  }
};

TEST_F(ClusterTest, RanksAreNumberedThroughTheHosts) {
  std::ofstream(folder_.path("vars")) << "GIVEN=a 'b' \"c\" $d %n\n";
  EXPECT_EQ(run_on("h1 slots=2\nh2 slots=3\nh3 slots=1\n", {"env"},
                   {"--exclude", "h2:1@h3", "--env-file", folder_.path("vars")}),
            0)
      << errors();
  std::set<std::string> run_ids, ports, secrets;
  for (int rank = 0; rank < 4; ++rank) {
    const std::string env = "\n" + folder_.read(str("env_", rank));
    const bool on_first = rank < 2;
    for (const std::string& line :
         {str("RANK=", rank), str("WORLD_SIZE=4"), str("LOCAL_RANK=", rank % 2), str("LOCAL_WORLD_SIZE=2"),
          str("GROUP_RANK=", on_first ? 0 : 1), str("GROUP_WORLD_SIZE=2"), str("MASTER_ADDR=127.0.0.1"),
          str("GIVEN=a 'b' \"c\" $d %n")})
      EXPECT_THAT(env, HasSubstr("\n" + line + "\n")) << rank;
    EXPECT_EQ(env.find("\nCUDA_VISIBLE_DEVICES=0,2\n") != env.npos, !on_first) << "slots 0 and 2 of h2";
    EXPECT_THAT(env, Not(HasSubstr("TESSERA_LAUNCH_")));
    std::smatch found;
    ASSERT_TRUE(std::regex_search(env, found, std::regex("\nTESSERA_RUN_ID=([0-9a-f]{16})\n")));
    run_ids.insert(found[1]);
    ASSERT_TRUE(std::regex_search(env, found, std::regex("\nMASTER_PORT=([0-9]+)\n")));
    ports.insert(found[1]);
    ASSERT_TRUE(std::regex_search(env, found, std::regex("\nTESSERA_RUN_SECRET=([0-9a-f]{32})\n")));
    secrets.insert(found[1]);
  }
  EXPECT_EQ(secrets.size(), 1U);
  EXPECT_EQ(run_ids.size(), 1U);
  EXPECT_EQ(ports.size(), 1U);
  EXPECT_THAT(folder_.read("ssh_args"), Not(HasSubstr("GIVEN"))) << "no value in a command line";
}

TEST_F(ClusterTest, TheFirstFailureOfAllHostsIsNamed) {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"cascade", "3"}, {"cascade", "3", "late"}}) {
    EXPECT_EQ(run_on("h1 slots=2\nh2 slots=2\n", words), 7);
    EXPECT_THAT(errors(),
                ContainsRegex("^error: rank 3 of 4 failed first: exit code 7, on host [^ ]+ at "
                              "[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}; last error: the real reason\n"));
    EXPECT_THAT(errors(), Not(HasSubstr("TESSERA_LAUNCH_FAILURE")));
    EXPECT_TRUE(nothing_runs());
  }
}

TEST_F(ClusterTest, AnErrorThatAllRanksReportStandsOnce) {
  EXPECT_EQ(run_on("h1 slots=1\nh2 slots=1\n", {"fail_alike", "4", "config.json: no such key"}), 4);
  EXPECT_EQ(errors(), "error: config.json: no such key\n");
}

TEST_F(ClusterTest, RanksOnOtherHostsThatHangAreEnded) {
  EXPECT_EQ(run_on("h1 slots=1\nh2 slots=1\n", {"fail", "1", "3", "gone"}, {"--save-grace", "1"}), 3);
  EXPECT_THAT(errors(), HasSubstr("last error: gone"));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(ClusterTest, ASignalLetsRanksOfAllHostsSave) {
  // Ranks of a host that is not told would save when this time is over, which is longer than the test waits.
  Tool tool(folder_, args("h1 slots=1\nh2 slots=2\n", {"save", "200"}, {"--save-grace", "1000"}), path());
  ASSERT_TRUE(folder_.wait_for("ready", 3));
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait(), 0) << errors();
  EXPECT_TRUE(folder_.has("saved_0") && folder_.has("saved_1") && folder_.has("saved_2"));
}

/// Nobody reads what rank 0 says until it has said all.
TEST_F(ClusterTest, AConnectionThatIsStoppedDoesNotHoldUpRankZero) {
  EXPECT_EQ(run_on("stopped slots=1\n", {"speak", "4"}), 0) << errors();
  EXPECT_TRUE(folder_.has("said_0"));
}

TEST_F(ClusterTest, WhenTheLauncherIsKilledTheHostsEnd) {
  Tool tool(folder_, args("h1 slots=1\nh2 slots=1\n", {"hang"}), path());
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGKILL);
  tool.wait();
  EXPECT_TRUE(nothing_runs());
}

TEST_F(ClusterTest, AHostThatCannotBeReachedEndsTheOthers) {
  EXPECT_EQ(run_on("h1 slots=1\nunreachable slots=1\n", {"hang"}, {"--save-grace", "1"}), 255);
  EXPECT_THAT(errors(), HasSubstr("ssh: no route\n"));
  EXPECT_THAT(errors(),
              HasSubstr("error: ssh to unreachable failed: exit code 255; what it said is above\n"));
  EXPECT_TRUE(nothing_runs());
}

/// The shell on the host must not wait for more to read.
TEST_F(ClusterTest, AHostWithoutTheWorkingDirectoryEndsTheRun) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::create_directory(folder_.path("work"));
  std::filesystem::current_path(folder_.path("work"));
  Tool tool(folder_, args("bare slots=1\n", {"env"}), path());
  std::filesystem::current_path(before);
  EXPECT_GT(tool.wait(), 0) << errors();
  EXPECT_THAT(errors(), HasSubstr(folder_.path("work")));
  EXPECT_THAT(errors(), ContainsRegex("error: ssh to bare failed: exit code [12]; what it said is above\n"));
  EXPECT_FALSE(folder_.has("env_0"));
}

TEST_F(ClusterTest, AnEmptySecretIsReplaced) {
  std::ofstream(folder_.path("vars")) << "TESSERA_RUN_SECRET=\n";
  const std::string secret = "(^|\n)TESSERA_RUN_SECRET=[0-9a-f]+\n";
  EXPECT_EQ(run_on("h1 slots=1\n", {"env"}, {"--env-file", folder_.path("vars")}), 0) << errors();
  EXPECT_THAT(folder_.read("env_0"), ContainsRegex(secret));
  // srun hands its own environment on.
  std::ofstream(folder_.path("bin/srun")) << "#!/bin/sh\n"
                                             "tr '\\0' '\\n' < /proc/$$/environ > '"
                                          << folder_.path("srun_env") << "'\n";
  ::chmod(folder_.path("bin/srun").c_str(), 0755);
  Tool tool(folder_,
            {"launch", "--launcher", "slurm", "--nnodes", "2", "--env-file", folder_.path("vars"), "--", "x"},
            path());
  EXPECT_EQ(tool.wait(), 0) << errors();
  const std::string env = folder_.read("srun_env");
  EXPECT_THAT(env, ContainsRegex(secret));
  EXPECT_THAT(env, Not(HasSubstr("TESSERA_RUN_SECRET=\n"))) << "a name stands there once";
}

TEST_F(ClusterTest, ATimeoutEndsAllHostsAndReturns124) {
  EXPECT_EQ(run_on("h1 slots=1\nh2 slots=1\n", {"save", "10"}, {"--timeout", "1"}), 124);
  EXPECT_THAT(errors(), HasSubstr("--timeout: the run has taken as long as it may and is ended"));
  EXPECT_TRUE(folder_.has("saved_0") && folder_.has("saved_1"));
}

TEST_F(ClusterTest, AllHostsAreStartedAgainOnAnotherPort) {
  EXPECT_EQ(run_on("h1 slots=1\nh2 slots=1\n", {"fail_until", "1", "3"},
                   {"--max-restarts", "2", "--save-grace", "0.5"}),
            0)
      << errors();
  EXPECT_THAT(errors(), HasSubstr("rank 1 of 2 failed first: exit code 3"));
  EXPECT_THAT(errors(), HasSubstr("warning: restart 1 of 2: 2 ranks\n"));
  std::set<std::string> ports, run_ids;
  for (const char* name : {"env_0_0", "env_1_0", "env_0_1", "env_1_1"}) {
    const std::string env = folder_.read(name);
    std::smatch found;
    ASSERT_TRUE(std::regex_search(env, found, std::regex("\nMASTER_PORT=([0-9]+)\n"))) << name;
    ports.insert(found[1]);
    ASSERT_TRUE(std::regex_search(env, found, std::regex("\nTESSERA_RUN_ID=([0-9a-f]{16})\n"))) << name;
    run_ids.insert(found[1]);
    EXPECT_THAT(env, HasSubstr(str("\nTORCHELASTIC_RESTART_COUNT=", name[6], "\n")));
    EXPECT_THAT(env, HasSubstr("\nTORCHELASTIC_MAX_RESTARTS=2\n"));
  }
  EXPECT_EQ(ports.size(), 2u);
  EXPECT_EQ(run_ids.size(), 1u);
  EXPECT_TRUE(nothing_runs());
}

TEST_F(ClusterTest, AHostThatCannotBeReachedIsLeftOut) {
  EXPECT_EQ(run_on("unreachable slots=1\nh1 slots=2\n", {"env"}, {"--nnodes", "1:2", "--save-grace", "0.5"}),
            0)
      << errors();
  EXPECT_THAT(errors(), HasSubstr("restart 1 of 1: 2 ranks instead of 3, without host unreachable\n"));
  // The rendezvous was to be on the host that is left out.
  for (const char* line : {"\nWORLD_SIZE=2\n", "\nGROUP_WORLD_SIZE=1\n", "\nMASTER_ADDR=h1\n"})
    EXPECT_THAT(folder_.read("env_1"), HasSubstr(line));
  // At least two are needed: the host is tried again.
  EXPECT_EQ(run_on("unreachable slots=1\nh1 slots=2\n", {"env"}, {"--nnodes", "2:2", "--max-restarts", "1"}),
            255);
  EXPECT_THAT(errors(), HasSubstr("restart 1 of 1: 3 ranks\n"));
}

TEST_F(ClusterTest, AMistakeOnAHostIsNotRestarted) {
  EXPECT_EQ(run_on("h1 slots=1\nh2 slots=1\n", {"mistake", "no such key"}, {"--max-restarts", "2"}), 1);
  EXPECT_THAT(errors(),
              HasSubstr("error: no such key\nwarning: not restarted: the same error would occur again\n"));
}

TEST_F(ClusterTest, WrongFlagsAreOneLine) {
  const auto refusal_of = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), "launch");
    flags.insert(flags.end(), {"--", "true"});
    Tool tool(folder_, flags, path());
    EXPECT_EQ(tool.wait(), 1);
    return errors();
  };
  const std::string hosts = hostfile("h1 slots=2\nh2 slots=2\n");
  EXPECT_EQ(refusal_of({"--launcher", "ssh"}),
            "error: --launcher ssh: expected --hostfile FILE, the hosts\n");
  EXPECT_EQ(refusal_of({"--launcher", "rsh"}),
            "error: --launcher rsh: expected one of local, ssh, pdsh, openmpi, slurm\n");
  EXPECT_EQ(refusal_of({"--hostfile", hosts, "--nnodes", "3"}),
            "error: --nnodes 3: the hostfile leaves 2 hosts\n");
  EXPECT_EQ(refusal_of({"--hostfile", hosts, "--num_gpus", "3"}), "error: --nproc 3: host h1 has 2 slots\n");
  EXPECT_EQ(refusal_of({"--hostfile", hosts, "--launcher", "local"}),
            "error: --launcher local: the hostfile names other hosts; expected this one alone, or another "
            "launcher\n");
  EXPECT_EQ(refusal_of({"--nnodes", "2"}),
            "error: --nnodes 2: expected --node-rank 0 to 1 on each host, or --hostfile FILE to start all "
            "from here\n");
  EXPECT_EQ(refusal_of({"--nnodes", "2", "--node-rank", "0"}),
            "error: --nnodes 2: expected --master-addr HOST, the address of host 0\n");
  EXPECT_EQ(refusal_of({"--nnodes", "2", "--node-rank", "2", "--master-addr", "h"}),
            "error: --node-rank 2: expected 0 to 1, because there are 2 hosts (--nnodes)\n");
  for (const char* wrong : {"7", "1,2", "0,1:3", "0:4"})
    EXPECT_EQ(refusal_of({"-n", "3", "--tee", wrong}),
              str("error: --tee ", wrong, ": expected 0 to 3, or ranks as in 0:3,1:3\n"));
  EXPECT_EQ(refusal_of({"-n", "2", "--tee", "0:3,7:3"}),
            "error: --tee: there is no rank 7 of a host; expected 0 to 1\n");
  EXPECT_EQ(refusal_of({"--hostfile", hosts, "--tee", "2:3"}),
            "error: --tee: there is no rank 2 of a host; expected 0 to 1\n");
  for (const char* list : {"x", "1,x", "3-", "2-1", "1,"})
    EXPECT_EQ(refusal_of({"--bind-core-list", list}),
              str("error: --bind-core-list: '", list,
                  "' is not a list of numbers; expected one as in 0,2 or 0-3\n"));
  EXPECT_EQ(refusal_of({"--bind-core-list", "99999"}),
            "error: --bind-core-list: this process may not run on core 99999\n");
}

TEST_F(ClusterTest, OneProcessOfSeveralStartsNoRunOfItsOwn) {
  const auto refusal_of = [&](std::vector<std::string> flags, std::vector<std::string> variables) {
    flags.insert(flags.begin(), "launch");
    flags.insert(flags.end(), {"--", "true"});
    Tool tool(folder_, flags, variables);
    EXPECT_EQ(tool.wait(), 1);
    return errors();
  };
  const auto mpirun = [](int rank, int local_size) {
    return std::vector<std::string>{str("OMPI_COMM_WORLD_RANK=", rank), "OMPI_COMM_WORLD_SIZE=2",
                                    str("OMPI_COMM_WORLD_LOCAL_RANK=", local_size - 1),
                                    str("OMPI_COMM_WORLD_LOCAL_SIZE=", local_size), "MASTER_ADDR=127.0.0.1"};
  };
  const std::string here = hostfile("localhost slots=2\n");
  for (const char* node : {"1", "-1", "100000000"})
    EXPECT_EQ(refusal_of({"--hostfile", here, "--node-rank", node}, {}),
              str("error: --node-rank ", node, ": the hostfile has 1 host; expected 0, or none\n"));
  for (const auto& variables : {mpirun(1, 1), mpirun(0, 1), {"PET_NNODES=2", "PET_NODE_RANK=1"}})
    EXPECT_EQ(
        refusal_of({"--hostfile", here}, variables),
        str("error: --hostfile ", here,
            ": this process is one of 2 that something else has started, one a host, and each would "
            "start all ranks; expected one process, no --hostfile, or that launcher's variables unset\n"));
  EXPECT_EQ(refusal_of({"-n", "2"}, mpirun(1, 2)),
            "error: this process already is rank 1 of 2 (Open MPI), one of 2 on this host that would each "
            "start ranks; expected one process a host, the program itself, or that launcher's variables "
            "unset\n");
  EXPECT_EQ(refusal_of({}, {"PET_NNODES=1:2", "PET_NPROC_PER_NODE=2"}),
            "error: PET_NNODES=1:2: expected a number, or --nnodes N; pods whose number may change are "
            "torchrun's\n");
  EXPECT_EQ(refusal_of({}, {"PET_NNODES=1", "PET_NPROC_PER_NODE=auto"}),
            "error: PET_NPROC_PER_NODE=auto: expected the number of ranks to start on this host, or --nproc "
            "N\n");
  EXPECT_EQ(refusal_of({}, {"PET_NNODES=2", "PET_NODE_RANK=0"}),
            "error: PET_NNODES=2: expected PET_MASTER_ADDR, or --master-addr HOST, the address of host 0\n");
  EXPECT_THAT(refusal_of({}, {"PET_NNODES=2", "PET_NODE_RANK=0", "MASTER_ADDR=h", "PET_MAX_RESTARTS=3"}),
              StartsWith("error: PET_MAX_RESTARTS: the launchers of hosts that were started one by one"));
  // Where flags give the place, in a shell of Slurm's, and for a rank each, others beside this one are meant.
  Tool placed(folder_, launch_args(folder_, 2, {"env"}, {"--nnodes", "1", "--node-rank", "0"}), mpirun(1, 2));
  EXPECT_EQ(placed.wait(), 0) << errors();
  Tool one(folder_, launch_args(folder_, 1, {"env"}), mpirun(1, 2));
  EXPECT_EQ(one.wait(), 0) << errors();
  std::vector<std::string> shell = mpirun(1, 2);
  shell.emplace_back("SLURM_PTY_PORT=1");
  Tool in_shell(folder_, launch_args(folder_, 2, {"env"}), shell);
  EXPECT_EQ(in_shell.wait(), 0) << errors();
  Tool tool(folder_, launch_args(folder_, 1, {"env"}), {"PET_NNODES=1:1", "PET_MAX_RESTARTS=3"});
  EXPECT_EQ(tool.wait(), 0) << errors();
  EXPECT_THAT(folder_.read("env_0"), HasSubstr("\nTORCHELASTIC_MAX_RESTARTS=3\n"));
}

TEST_F(ClusterTest, HostsStartedByHand) {
  const std::vector<std::string> common = {"--nnodes",      "2",    "--master_addr", "127.0.0.1",
                                           "--master_port", "29877"};
  for (const char* node : {"0", "1"}) {
    std::vector<std::string> flags = common;
    flags.insert(flags.end(), {"--node_rank", node});
    Tool tool(folder_, launch_args(folder_, 2, {"env"}, flags));
    EXPECT_EQ(tool.wait(), 0) << errors();
  }
  EXPECT_THAT(folder_.read("env_3"), HasSubstr("\nLOCAL_RANK=1\n"));
  EXPECT_THAT(folder_.read("env_3"), HasSubstr("\nWORLD_SIZE=4\n"));
  EXPECT_THAT(folder_.read("env_2"), HasSubstr("\nMASTER_PORT=29877\n"));
}

TEST_F(ClusterTest, TeeShowsAllRanksAndLogsThem) {
  const std::string logs = folder_.path("logs");
  EXPECT_EQ(run_on("h1 slots=1\nh2 slots=2\n", {"fail_alike", "0", "spoken"}, {"--tee", "--log-dir", logs}),
            0);
  EXPECT_THAT(output(), HasSubstr("[rank 1] [error] spoken\n"));
  EXPECT_THAT(output(), HasSubstr("[rank 2] [error] spoken\n"));
  for (const char* name : {"logs/rank_00000.log", "logs/rank_00001.log", "logs/rank_00002.log"})
    EXPECT_TRUE(folder_.has(name));
  EXPECT_EQ(folder_.read("logs/rank_00002.log"), "[error] spoken\n");
}

TEST(ClusterCommands, EachEngineIsToldWhatItNeeds) {
  ClusterOptions options;
  options.hosts = {{"n1", {0, 1}}, {"n2", {0}}};
  options.num_nodes = 2;
  options.launcher = "/opt/tessera";
  options.program = "a program";
  options.args = {"100%", "it's"};
  options.directory = "/a dir";
  options.run_id = "00112233445566aa";
  options.run_secret = "known to ranks only";
  options.variables = {"SECRET=x y"};
  options.engine_args = {"--more"};
  options.master_port = 4321;

  options.engine = Engine::kSsh;
  options.ssh_port = 2222;
  const auto ssh = engine_commands(options);
  ASSERT_EQ(ssh.size(), 2U);
  EXPECT_THAT(ssh[1].args, ElementsAre("-o", "BatchMode=yes", "-T", "-p", "2222", "--more", "-o",
                                       "ConnectTimeout=30", "-o", "ServerAliveInterval=15", "-o",
                                       "ServerAliveCountMax=3", "--", "n2", "/bin/sh"));
  EXPECT_THAT(ssh[1].input, StartsWith("cd '/a dir' && export '"));
  EXPECT_THAT(ssh[1].input, Not(HasSubstr("env "))) << "its arguments can be seen";
  EXPECT_THAT(ssh[1].input, HasSubstr(" 'SECRET=x y' "));
  EXPECT_THAT(ssh[1].input, HasSubstr(" 'TESSERA_RUN_SECRET=known to ranks only' "));
  EXPECT_THAT(ssh[1].input,
              HasSubstr("'/opt/tessera' 'launch' '--master-addr=n1' '--master-port=4321' '--node-rank=1' "
                        "'--' 'a program' '100%' 'it'\\''s' || exit\n"));

  options.engine = Engine::kPdsh;
  const auto pdsh = engine_commands(options);
  ASSERT_EQ(pdsh.size(), 1U);
  EXPECT_THAT(pdsh[0].args.back(), HasSubstr("'--node-rank=%n' '--' 'a program' '100%%' "));
  EXPECT_THAT(pdsh[0].args, Contains("n1,n2"));
  EXPECT_THAT(pdsh[0].args.back(), Not(HasSubstr("RUN_SECRET"))) << "all users may read it there";

  options.engine = Engine::kOpenMpi;
  const auto mpirun = engine_commands(options);
  EXPECT_EQ(mpirun[0].end_signal, SIGUSR2);
  EXPECT_THAT(mpirun[0].args, Contains("SECRET"));
  EXPECT_THAT(mpirun[0].args, Not(Contains(HasSubstr("x y"))));
  EXPECT_THAT(mpirun[0].args, Not(Contains(HasSubstr("known to"))));
  EXPECT_THAT(mpirun[0].variables, Contains("TESSERA_RUN_SECRET=known to ranks only"));
  EXPECT_THAT(mpirun[0].variables, Contains("SECRET=x y"));
  EXPECT_THAT(mpirun[0].variables, Contains("TESSERA_LAUNCH_HOSTS=n1:0,1@n2:0"));

  options.engine = Engine::kSlurm;
  const auto srun = engine_commands(options);
  EXPECT_THAT(srun[0].args, Contains("--nodelist=n1,n2"));
  EXPECT_THAT(srun[0].args, Contains("--cpus-per-task=2"));
  EXPECT_THAT(srun[0].variables, Contains("SECRET=x y"));
}

}  // namespace
}  // namespace tessera::launcher

// Hostfiles, --include and --exclude, --env-file. What DeepSpeed 0.18 makes of the same texts is noted where
// it differs.
#include "launcher/environment/hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <fstream>

#include "core/error.h"
#include "launcher/environment/env_file.h"
#include "launcher/environment/environment.h"
#include "tests/launcher/tool.h"
#include "tests/support/errors.h"

namespace tessera::launcher {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using testing::Folder;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class HostsTest : public ::testing::Test {
 protected:
  std::string file(const std::string& content) {
    std::ofstream(folder_.path("hosts")) << content;
    return folder_.path("hosts");
  }
  std::string refusal(const std::string& content) {
    return error_of<ConfigError>([&] { read_hostfile(file(content)); });
  }
  Folder folder_;
};

TEST_F(HostsTest, AHostAndItsSlotsALine) {
  const auto hosts = read_hostfile(file("# two hosts\n\nn1 slots=2\n  n2\tslots=1   # the small one\n"));
  EXPECT_EQ(encode_hosts(hosts), "n1:0,1@n2:0");
  for (const char* text : {"n1:0,1@n2:0", "fe80::1%eth0:0@::1:0,1"})
    EXPECT_EQ(encode_hosts(decode_hosts(text)), text);
}

TEST_F(HostsTest, OtherFormsOfALine) {  // the second word: what ssh gets
  for (const auto& [line, target] : {std::pair("me@n1 slots=2", "me@n1"),
                                     {"n1 slots=2 max_slots=4", "n1"},
                                     {"n1 max-slots=2 slots=2  # Open MPI's", "n1"},
                                     {"me.x-1@my_host-1.example.org slots=2", "me.x-1@my_host-1.example.org"},
                                     {"10.0.0.1 slots=2", "10.0.0.1"},
                                     {"[::1] slots=2", "::1"},
                                     {"me@fe80::1%eth0 slots=2", "me@fe80::1%eth0"}}) {
    const auto hosts = read_hostfile(file(line));
    EXPECT_EQ(hosts.at(0).target(), target);
    EXPECT_EQ(hosts[0].slots.size(), 2u) << line;
    EXPECT_EQ(select_hosts(hosts, hosts[0].name, "").at(0).target(), target) << line;
    EXPECT_EQ(select_hosts(hosts, hosts[0].name + ":1", "").at(0).slots, std::vector<int>{1}) << line;
  }
}

TEST_F(HostsTest, WhatSshMayTakeForSomethingElseIsNoHost) {
  const std::string nul("n1\0", 3), nul_in_address("::1\0;x", 6);
  for (const std::string& name :
       {std::string("n1;reboot"), std::string("$HOME"), std::string("`id`"), std::string("-oProxyCommand=x"),
        std::string("me@-n1"), std::string("-l@n1"), std::string("@n1"), std::string("me@"),
        std::string("n1:0"), std::string("n1,n2"), std::string("n1/x"), std::string("n\x1b[0m1"),
        std::string("n1|x"), std::string("n'1"), std::string("[n1]"), std::string("b\xc3\xbc"), nul,
        nul_in_address})
    EXPECT_THAT(refusal("n0 slots=1\n" + name + " slots=2\n"),
                AllOf(StartsWith(folder_.path("hosts") + ":2: '"),
                      HasSubstr("is no host; expected HOST or USER@HOST")))
        << name;
  EXPECT_THAT(error_of<ConfigError>([] { decode_hosts("-x:0"); }), HasSubstr("'-x:0' is not a host"));
}

TEST_F(HostsTest, ABadLineIsNamedWithFileAndLine) {
  const std::string path = folder_.path("hosts");
  EXPECT_EQ(refusal("n1 slots=2\nn2\n"), path + ":2: 'n2': expected HOST slots=N, with 1 to 4096 slots");
  for (const char* line : {"n1 slots=", "n1 slots=x", "n1 slots=0", "n1 slots=-1", "n1 slots=4097",
                           "n1 slot=2", "slots=2", "n1 slots=2 n2 slots=2", "n1 slots=2 slots=2",
                           "n1 max_slots=4", "n1 slots=4 max_slots=2", "n1 n2 slots=2"})
    EXPECT_THAT(refusal(std::string(line) + "\n"),
                HasSubstr(path + ":1: '" + line + "': expected HOST slots=N"))
        << line;
  EXPECT_EQ(refusal("n1 slots=1\n#\nn1 slots=2\n"),
            path + ":3: host 'n1' stands there twice; expected one line with all its slots");
  EXPECT_THAT(refusal("# nothing\n"), HasSubstr("no hosts; expected lines HOST slots=N"));
  EXPECT_THAT(error_of<ConfigError>([&] { read_hostfile(folder_.path("none")); }),
              HasSubstr("the file cannot be read"));
}

TEST_F(HostsTest, AVeryLongFileIsReadOrRefusedAtOnce) {
  std::string lines;
  for (int i = 0; i < 4096; ++i) lines += "n" + std::to_string(i) + " slots=1\n";
  EXPECT_EQ(read_hostfile(file(lines)).size(), 4096u);
  for (int i = 4096; i < 200'000; ++i) lines += "n" + std::to_string(i) + " slots=1\n";
  const std::clock_t start = std::clock();  // of this process, whatever runs beside it
  EXPECT_EQ(refusal(lines),
            folder_.path("hosts") + ":4097: more than 4096 hosts; expected at most that many");
  EXPECT_LT(refusal(std::string(20'000'000, 'n') + " slots=1\n").size(), 1'000u);
  EXPECT_LT(refusal(std::string(254, 'n') + " slots=1\n").size(), 1'000u);
  std::string variables;
  for (int i = 0; i < 200'000; ++i) variables += "V" + std::to_string(i) + "=1\n";
  std::ofstream(folder_.path("env")) << variables;
  EXPECT_EQ(read_env_file(folder_.path("env")).size(), 200'000u);
  EXPECT_LT(std::clock() - start, 20 * CLOCKS_PER_SEC)
      << "a fifth of a second, or minutes where each line is compared with all";
}

TEST_F(HostsTest, IncludeAndExcludeAreDeepSpeeds) {
  const auto hosts = decode_hosts("w0:0,1,2,3@w1:0,1,2,3");
  const auto include = [&](const char* text) { return encode_hosts(select_hosts(hosts, text, "")); };
  const auto exclude = [&](const char* text) { return encode_hosts(select_hosts(hosts, "", text)); };
  EXPECT_EQ(include("w0@w1:0,2"), "w0:0,1,2,3@w1:0,2");
  EXPECT_EQ(include("w1:0,2@w0"), "w0:0,1,2,3@w1:0,2") << "the hostfile's order";
  EXPECT_EQ(include("w1:2,0,2"), "w1:0,2");
  EXPECT_EQ(include("w1:0@w1:3"), "w1:0,3");
  EXPECT_EQ(include("w1:1-3"), "w1:1,2,3") << "a range, which DeepSpeed refuses";
  EXPECT_EQ(exclude("w1:0"), "w0:0,1,2,3@w1:1,2,3");
  EXPECT_EQ(exclude("w0"), "w1:0,1,2,3");
  EXPECT_EQ(exclude("w0:0,1,2,3"), "w1:0,1,2,3");
  EXPECT_EQ(encode_hosts(select_hosts(hosts, "", "")), encode_hosts(hosts));
  const auto refusal = [&](const char* in, const char* out) {
    return error_of<ConfigError>([&] { select_hosts(hosts, in, out); });
  };
  EXPECT_EQ(refusal("w0", "w1"), "--include, --exclude: expected one of them");
  EXPECT_EQ(refusal("w2", ""), "--include: host 'w2' is not in the hostfile, which has w0, w1");
  EXPECT_EQ(refusal("", "w1:4"), "--exclude: host 'w1' has no slot 4; expected 0 to 3");
  EXPECT_EQ(refusal("w1:", ""), "--include: '' is not a list of numbers; expected one as in 0,2 or 0-3");
  EXPECT_EQ(refusal("", "w0@w1"), "--exclude w0@w1: no slot is left");
}

TEST_F(HostsTest, AnEnvFileHasAVariableALine) {
  std::ofstream(folder_.path("env")) << "# for all ranks\nNCCL_DEBUG=INFO\n\nTOKEN=a=b c \r\nEMPTY=\n";
  EXPECT_EQ(read_env_file(folder_.path("env")),
            (std::vector<std::string>{"NCCL_DEBUG=INFO", "TOKEN=a=b c ", "EMPTY="}));
  for (const char* wrong : {"A", "=b", "1A=b", "A B=c", "export A=b"}) {
    std::ofstream(folder_.path("env")) << "GOOD=1\n" << wrong << '\n';
    EXPECT_EQ(error_of<ConfigError>([&] { read_env_file(folder_.path("env")); }),
              folder_.path("env") + ":2: expected NAME=VALUE, with a name of letters, digits and _");
  }
  std::ofstream(folder_.path("env")) << "A=1\nAB=2\nA=3\n";
  EXPECT_EQ(error_of<ConfigError>([&] { read_env_file(folder_.path("env")); }),
            folder_.path("env") + ":3: A stands there twice");
  for (const std::string& line : rank_environment({.given = {"GIVEN=1"}})) {
    const std::string name = line.substr(0, line.find('='));
    if (!is_always_set(name)) continue;
    std::ofstream(folder_.path("env")) << name << "=7\n";
    EXPECT_EQ(error_of<ConfigError>([&] { read_env_file(folder_.path("env")); }),
              folder_.path("env") + ":1: " + name + " is set by the launcher; expected " +
                  (name == "MASTER_ADDR"   ? "--master-addr"
                   : name == "MASTER_PORT" ? "--master-port"
                                           : "other variables"));
  }
}

}  // namespace
}  // namespace tessera::launcher

#include "launcher/process/error_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/launcher/tool.h"

namespace tessera::launcher {
namespace {

using testing::Folder;

class ErrorFileTest : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    ::unsetenv("TESSERA_ERROR_FILE");
    ::unsetenv("TORCHELASTIC_ERROR_FILE");
  }
  std::string log_of(const std::string& content) {
    std::ofstream(folder_.path("log")) << content;
    return last_error_line(folder_.path("log"));
  }
  Folder folder_;
};

TEST_F(ErrorFileTest, ReportIsReadBackOnOneLineWithItsTime) {
  ::setenv("TESSERA_ERROR_FILE", folder_.path("error").c_str(), 1);
  const int64_t before = monotonic_ns();
  report_error("first line\n  second line\x1b[31m red\x1b[0m");
  const auto report = read_error_report(folder_.path("error"));
  ASSERT_TRUE(report);
  EXPECT_EQ(report->message, "first line   second line red");
  EXPECT_GE(report->time_ns, before);
  EXPECT_LE(report->time_ns, monotonic_ns());
}

TEST_F(ErrorFileTest, TheKindOfErrorIsMarked) {
  for (const ErrorKind kind : {ErrorKind::kOwn, ErrorKind::kWouldRecur, ErrorKind::kOfPeer}) {
    const std::string path = folder_.path(std::to_string(static_cast<int>(kind)));
    ::setenv("TESSERA_ERROR_FILE", path.c_str(), 1);
    report_error("rank 1 left the group", kind);
    EXPECT_EQ(read_error_report(path)->would_recur, kind == ErrorKind::kWouldRecur);
    EXPECT_EQ(read_error_report(path)->of_peer, kind == ErrorKind::kOfPeer);
  }
}

TEST_F(ErrorFileTest, FirstReportIsKeptAndNoTemporaryFileIsLeft) {
  ::setenv("TESSERA_ERROR_FILE", folder_.path("error").c_str(), 1);
  report_error("first");
  report_error("second");
  EXPECT_EQ(read_error_report(folder_.path("error"))->message, "first");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 1);
}

TEST_F(ErrorFileTest, WithoutALauncherNothingHappens) {
  report_error("no launcher");
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  ::setenv("TESSERA_ERROR_FILE", folder_.path("no/such/folder/error").c_str(), 1);
  report_error("cannot be written");
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(ErrorFileTest, UnderTorchrunItIsTorchrunsJson) {
  ::setenv("TESSERA_ERROR_FILE", "", 1);  // as good as unset
  ::setenv("TORCHELASTIC_ERROR_FILE", folder_.path("error.json").c_str(), 1);
  report_error("no \"file\" C:\\x\nhere\xff");
  const auto json = nlohmann::json::parse(folder_.read("error.json"));
  EXPECT_EQ(json["message"]["message"], "no \"file\" C:\\x here\ufffd");
  EXPECT_GT(std::stoll(json["message"]["extraInfo"]["timestamp"].get<std::string>()), 1'500'000'000);
}

TEST_F(ErrorFileTest, TheReportOfTorchsRecordIsRead) {
  std::ofstream(folder_.path("error"))
      << R"({"message": {"message": "ValueError: bad\nbatch", "extraInfo": {"py_callstack": "...", "timestamp": "1700000000"}}})";
  const auto report = read_error_report(folder_.path("error"));
  ASSERT_TRUE(report);
  EXPECT_EQ(report->message, "ValueError: bad batch");
  EXPECT_NEAR(static_cast<double>(report->time_ns), static_cast<double>(monotonic_ns()), 1e9)
      << "the file's time";
}

TEST_F(ErrorFileTest, OtherFileIsNoReport) {
  std::ofstream(folder_.path("error")) << "not a time\nmessage\n";
  EXPECT_FALSE(read_error_report(folder_.path("error")));
  EXPECT_FALSE(read_error_report(folder_.path("absent")));
}

TEST_F(ErrorFileTest, LastErrorLineIsTheLastThatMentionsAnError) {
  EXPECT_EQ(log_of("start\nerror: one\nRuntimeError: two\nclosing files\n\n"), "RuntimeError: two");
  EXPECT_EQ(log_of("terminate called after throwing\n  what():  bad\nframe #0: c10::Error at x\n"),
            "what():  bad");
  EXPECT_EQ(log_of("10%\r50%\rstopped here"), "stopped here");
  EXPECT_EQ(log_of("\x1b[31mError:\x1b[0m red\n"), "Error: red");
  EXPECT_EQ(log_of("\n \n"), "");
  EXPECT_EQ(last_error_line(folder_.path("absent")), "");
}

TEST_F(ErrorFileTest, LogHasOtherLinesThanThoseMessages) {
  const auto says_more = [&](const std::string& log, const std::vector<std::string>& told) {
    std::ofstream(folder_.path("log")) << log;
    return has_other_lines(folder_.path("log"), told);
  };
  EXPECT_FALSE(says_more("", {}));
  EXPECT_FALSE(says_more("\n \n", {}));
  EXPECT_FALSE(says_more("\x1b[31m[error]\x1b[0m no such file\n", {"no such file"}));
  EXPECT_FALSE(says_more("[error] rank 0 left the group: no such file\n", {"no such file"}));
  EXPECT_FALSE(says_more("two\nlines\n", {"two lines"}));
  EXPECT_TRUE(says_more("a warning\n[error] no such file\n", {"no such file"}));
  EXPECT_TRUE(says_more("[error] no such file\n", {}));
  EXPECT_FALSE(has_other_lines(folder_.path("absent"), {}));
}

TEST_F(ErrorFileTest, LastErrorLineOfAHugeLogIsBounded) {
  std::string log(3'000'000, 'x');
  log += "\nerror: " + std::string(10'000, 'y');
  const std::string line = log_of(log);
  EXPECT_THAT(line, ::testing::StartsWith("error: yyy"));
  EXPECT_LE(line.size(), 503u);
  // A line is not cut within a UTF-8 character.
  std::string wide = "error: ";
  for (int i = 0; i < 1000; ++i) wide += "ü";
  EXPECT_NO_THROW(nlohmann::json(log_of(wide)).dump());
}

}  // namespace
}  // namespace tessera::launcher

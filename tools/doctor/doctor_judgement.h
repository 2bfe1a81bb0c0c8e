// Judges what `tessera doctor` has found out: what is good, what is not, and what to do. Pure.
#pragma once

#include <string>
#include <vector>

#include "tools/doctor/doctor_report.h"

namespace tessera::tools {

/// kWarning: a run works, but slower than it could, or may fail later. kProblem: a run fails.
enum class Level { kOk, kWarning, kProblem };

/// "ok", "warning", "problem".
const char* name_of(Level level);

/// One check of one host, or of the group.
struct Finding {
  Level level = Level::kOk;
  std::string host;    ///< "": of the group
  std::string check;   ///< "memory", "clock" …
  std::string found;   ///< one line
  std::string advice;  ///< what to do, one line; "" where all is well
};

/// The findings of each host in the report's order, then those of the group.
std::vector<Finding> judge(const DoctorReport& report);

/// How many findings have this level.
int count(const std::vector<Finding>& findings, Level level);

/// What to do about a host that was not reached, by what ssh or the shell said.
std::string advice_for_unreachable(const std::string& host, const std::string& reason);

}  // namespace tessera::tools

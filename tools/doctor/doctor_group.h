// What the ranks of `tessera doctor` do together: join as any run does, and measure.
#pragma once

#include <optional>

#include "tools/doctor/doctor_report.h"

namespace tessera::tools {

/// Collective. Joins the group of the environment with the backend and device that "auto" chooses, measures
/// collectives and clocks, and gathers the facts of all hosts. Rank 0 gets the report. Throws as comm::join.
std::optional<DoctorReport> examine_group();

}  // namespace tessera::tools

// The report of `tessera doctor`, for people and for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/doctor/doctor_judgement.h"
#include "tools/doctor/doctor_report.h"

namespace tessera::tools {

/// Formats the report in lines of at most `width` columns; 60 are enough for all but long words.
std::string doctor_text(const DoctorReport& report, const std::vector<Finding>& findings, int width);

/// {"ranks", "backend", "device", "problems", "warnings", "findings", "hosts", "collectives"};
/// docs/doctor.md has the keys.
nlohmann::json doctor_json(const DoctorReport& report, const std::vector<Finding>& findings);

}  // namespace tessera::tools

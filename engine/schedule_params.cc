#include "engine/schedule_params.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/str.h"

namespace tessera {

void ScheduleParams::fail(const std::string& key, const std::string& problem) const {
  throw ConfigError(str("scheduler.params.", key, ": ", problem, " (scheduler.type is ", config_.type, ")"));
}

bool ScheduleParams::has(const std::string& key) {
  read_.insert(key);
  if (config_.words.count(key)) fail(key, str("found \"", config_.words.at(key), "\", expected a number"));
  return config_.params.count(key) > 0;
}

const std::vector<double>& ScheduleParams::required(const std::string& key) {
  if (!has(key)) fail(key, "is missing; this schedule has no default for it");
  return config_.params.at(key);
}

double ScheduleParams::number(const std::string& key) {
  const auto& values = required(key);
  if (values.size() != 1) fail(key, str("found a list of ", values.size(), " values, expected one number"));
  if (!std::isfinite(values[0])) fail(key, str("found ", values[0], ", expected a finite number"));
  return values[0];
}

double ScheduleParams::number(const std::string& key, double fallback) {
  return has(key) ? number(key) : fallback;
}

int64_t ScheduleParams::required_integer(const std::string& key, int64_t minimum) {
  const double value = number(key);
  if (value != std::floor(value) || value < static_cast<double>(minimum) || value > 9e15)
    fail(key, str("found ", value, ", expected a whole number of at least ", minimum));
  return static_cast<int64_t>(value);
}

int64_t ScheduleParams::integer(const std::string& key, int64_t fallback, int64_t minimum) {
  return has(key) ? required_integer(key, minimum) : fallback;
}

bool ScheduleParams::flag(const std::string& key, bool fallback) {
  if (!has(key)) return fallback;
  const double value = number(key);
  if (value != 0 && value != 1) fail(key, str("found ", value, ", expected true or false"));
  return value == 1;
}

std::vector<double> ScheduleParams::per_group(const std::string& key) {
  const auto& values = required(key);
  if (values.size() != 1 && values.size() != num_groups_)
    fail(key, str("found a list of ", values.size(), " values, expected one number or ", num_groups_,
                  " (one for each param group)"));
  for (double value : values)
    if (!std::isfinite(value)) fail(key, str("found ", value, ", expected a finite number"));
  return values.size() == num_groups_ ? values : std::vector<double>(num_groups_, values[0]);
}

std::vector<double> ScheduleParams::per_group(const std::string& key, double fallback) {
  return has(key) ? per_group(key) : std::vector<double>(num_groups_, fallback);
}

std::string ScheduleParams::word(const std::string& key, const std::string& fallback,
                                 const std::vector<std::string_view>& accepted) {
  read_.insert(key);
  if (config_.params.count(key)) fail(key, str("found a number, expected one of ", join(accepted, ", ")));
  const auto found = config_.words.find(key);
  if (found == config_.words.end()) return fallback;
  if (std::find(accepted.begin(), accepted.end(), found->second) == accepted.end())
    fail(key, str("found \"", found->second, "\", expected one of ", join(accepted, ", ")));
  return found->second;
}

void ScheduleParams::reject_unread() const {
  const auto reject = [this](const std::string& key) {
    if (!read_.count(key)) fail(key, str("unknown key; accepted are ", join(read_, ", ")));
  };
  for (const auto& [key, values] : config_.params) reject(key);
  for (const auto& [key, word] : config_.words) reject(key);
}

}  // namespace tessera

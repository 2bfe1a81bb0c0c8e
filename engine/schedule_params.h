// ScheduleParams: scheduler.params, read key by key with defaults; whatever was
// not asked for is an unknown key.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/config/config.h"

namespace tessera {

/// Borrows the config; lives while a schedule is being built.
class ScheduleParams {
 public:
  ScheduleParams(const SchedulerConfig& config, size_t num_groups)
      : config_(config), num_groups_(num_groups) {}

  bool has(const std::string& key);
  /// Each throws ConfigError when the key is absent and no default is given, or its value is of another kind.
  double number(const std::string& key);
  double number(const std::string& key, double fallback);
  int64_t integer(const std::string& key, int64_t fallback, int64_t minimum);
  int64_t required_integer(const std::string& key, int64_t minimum);
  bool flag(const std::string& key, bool fallback);
  /// One value for all param groups, or a list with one for each.
  std::vector<double> per_group(const std::string& key);
  std::vector<double> per_group(const std::string& key, double fallback);
  std::string word(const std::string& key, const std::string& fallback,
                   const std::vector<std::string_view>& accepted);

  /// Throws ConfigError when a key was given that the schedule did not read.
  void reject_unread() const;

  [[noreturn]] void fail(const std::string& key, const std::string& problem) const;

 private:
  const std::vector<double>& required(const std::string& key);

  const SchedulerConfig& config_;
  size_t num_groups_;
  std::set<std::string> read_;
};

}  // namespace tessera

#include "tools/common/command_line.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

#include "checkpoint/sharded/catalog.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/files/pending_file.h"
#include "core/str.h"
#include "core/terminal.h"
#include "engine/config/arguments.h"
#include "engine/config/document/suggest.h"
#include "train/run/run_directory.h"
#include "train/task/trainer_config.h"

namespace tessera::tools {
namespace {

constexpr int kColumns = 80;
constexpr int kNameColumns = 26;

/// Beside the names.
std::string wrapped(const std::string& text) { return wrap_words(text, kColumns - kNameColumns, 0); }

std::vector<std::string> commands_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

std::vector<std::string> options_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

/// The path of the only key of a configuration with this name or alias; "" if there is none or more than one.
std::string key_named(const std::string& name, const config::KeyTable& table) {
  std::vector<std::string> paths;
  for (const config::Key& key : table.keys()) {
    if (key.use != config::Use::kUsed || key.type == config::Type::kSection ||
        key.type == config::Type::kFreeSection)
      continue;
    std::vector<std::string> names = key.aliases;
    names.push_back(key.path);
    const bool has_name = std::any_of(names.begin(), names.end(), [&](const std::string& one) {
      return one == name || one.substr(one.rfind('.') + 1) == name;
    });
    if (key.path == name) return name;
    if (has_name && std::find(paths.begin(), paths.end(), key.path) == paths.end()) paths.push_back(key.path);
  }
  // Keys of a section's sections are not meant by their last name, where another key has it.
  const auto depth = [](const std::string& path) { return std::count(path.begin(), path.end(), '.'); };
  std::stable_sort(paths.begin(), paths.end(),
                   [&](const std::string& a, const std::string& b) { return depth(a) < depth(b); });
  if (paths.size() == 1 || (paths.size() > 1 && depth(paths[0]) < depth(paths[1]))) return paths.front();
  return "";
}

/// "; a key of the configuration is given by --set trainer.epochs=3" for an option that has a key's name;
/// otherwise
/// "".
std::string as_override(const std::vector<std::string>& extras) {
  if (!extras[0].starts_with("--")) return "";
  const size_t equals = extras[0].find('=');
  std::string name = extras[0].substr(2, equals == std::string::npos ? equals : equals - 2);
  std::replace(name.begin(), name.end(), '-', '_');
  if (const std::string_view instead = config::instead_of_argument(name); !instead.empty())
    return str(": ", instead);
  const std::string key = key_named(name, train::run_keys());
  if (key.empty()) return "";
  const bool has_next = extras.size() > 1 && !extras[1].starts_with("--");
  const std::string value = equals != std::string::npos ? extras[0].substr(equals + 1)
                            : has_next                  ? extras[1]
                                                        : "true";
  return str("; a key of the configuration is given by --set ", key, "=", value);
}

std::string unknown_command(const CLI::App& app, const std::string& word) {
  const std::vector<std::string> known = commands_of(app);
  const bool is_option = word.starts_with('-');
  return str(word.empty() ? std::string("no command was given")
                          : str("unknown ", is_option ? "option '" : "command '", word, "'",
                                config::did_you_mean(word, is_option ? options_of(app) : known)),
             "; expected ", app.get_name(), " ", join(known, " or "), " (", app.get_name(), " --help)");
}

}  // namespace

std::vector<std::string> shown_names(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames())
    if (name.find('_') == name.npos) names.push_back("--" + name);
  return names;
}

HelpFormatter::HelpFormatter() { column_width(kNameColumns); }

std::string HelpFormatter::make_description(const CLI::App* app) const {
  return app->get_description() + "\n";
}

std::string HelpFormatter::make_option_name(const CLI::Option* option, bool is_positional) const {
  return is_positional ? option->get_name(true, false) : join(shown_names(*option), ", ");
}

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  return option->get_positional() ? "" : Formatter::make_option_opts(option);
}

std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  return wrapped(option->get_description());
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  std::ostringstream out;
  CLI::detail::format_help(out, command->get_name(), wrapped(command->get_description()), kNameColumns);
  return out.str();
}

void add_overrides(CLI::App& command, std::vector<std::string>& overrides, const std::string& description) {
  command.add_option("--set", overrides, description)->type_name("KEY=VALUE")->expected(1)->take_all();
}

void add_run(CLI::App& command, std::string& folder, std::string& tag) {
  command.add_option("RUN", folder, "Folder of a run, e.g. runs/NAME, or of a checkpoint of it")->required();
  command.add_option("--tag", tag, "A checkpoint of it (default: its model.safetensors, else the latest)")
      ->type_name("TAG");
}

void refuse_empty_values(CLI::App& app) {
  for (CLI::App* const command : app.get_subcommands({}))
    for (const char* const name :
         {"--init", "--tag", "--master-addr", "--launcher", "--bind-core-list", "--log-dir", "--env-file",
          "--hostfile", "--out", "--output", "--memory", "--disk", "--optimizer", "--precision", "--file",
          "--format", "--dtype", "--max-shard-size", "RUN"})
      if (CLI::Option* const option = command->get_option_no_throw(name))
        option->check([](const std::string& value) {
          return std::string(value.empty() ? "is empty; expected a value" : "");
        });
}

std::vector<char*> with_command(int argc, char** argv) {
  std::vector<char*> arguments(argv, argv + argc);
  const std::string_view path = argc > 0 ? argv[0] : "";
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (name == "zero_to_fp32" || name == "zero_to_fp32.py")
    arguments.insert(arguments.begin() + 1, const_cast<char*>("consolidate"));  // argv is only read
  arguments.push_back(nullptr);
  return arguments;
}

void check_output(const std::string& option, const std::string& output, const std::string& input) {
  namespace fs = std::filesystem;
  std::error_code error;
  const auto refuse = [&](const std::string& what) {
    throw ConfigError(option, " ", output, ": is ", what, ", which would be replaced; expected another name");
  };
  if (!input.empty() && fs::equivalent(output, input, error)) refuse("the input");
  const fs::path path = fs::absolute(output, error), folder = path.parent_path();
  if (!fs::is_regular_file(path, error)) return;
  const std::string name = path.filename().string();
  if (fs::exists(folder / checkpoint::kManifestName, error) &&
      (name.ends_with(".h5") || name.ends_with(".json")))
    refuse("a file of a checkpoint");
  if (fs::exists(folder / train::kConfigName, error) && fs::exists(folder / train::kMetricsName, error))
    for (const char* const own : {train::kConfigName, train::kMetricsName, train::kStateName,
                                  train::kResultsName, train::kRunIdName, train::kModelName})
      if (name == own) refuse("a file of a run");
}

void check_writable(const std::filesystem::path& file) {
  const Disk disk({.sync = false, .probe = {}});
  const PendingFile pending(disk, file);  // which it removes
}

std::string describe_mistake(const CLI::App& app, const CLI::ParseError& error, int argc,
                             const char* const* argv) {
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  if (parsed.empty()) return unknown_command(app, argc > 1 ? argv[1] : "");
  const CLI::App& command = *parsed.front();
  const std::vector<std::string> extras = app.remaining(/*recurse=*/true);
  const std::vector<std::string> options = options_of(command);
  std::string what = error.what();
  if (!extras.empty()) {
    const bool takes_keys = std::find(options.begin(), options.end(), "--set") != options.end();
    const std::string instead = takes_keys ? as_override(extras) : "";
    what = str("unexpected '", extras[0], "'",
               instead.empty() ? config::did_you_mean(extras[0], options) : instead);
  }
  std::replace(what.begin(), what.end(), '\n', ' ');
  return str(command.get_name(), ": ", what, " (", app.get_name(), " ", command.get_name(), " --help)");
}

DType parse_output_dtype(const std::string& word) {
  const auto dtype = parse_dtype(word);
  if (dtype && dtype != DType::kFloat64) return *dtype;
  throw ConfigError("--dtype ", word.empty() ? "''" : word, ": expected fp32, bf16 or fp16");
}

int64_t parse_size(const std::string& option, const std::string& text, bool bare_bytes) {
  struct Unit {
    std::string_view name;
    double bytes;
  };
  static constexpr std::array kUnits = {
      Unit{"", 1},      Unit{"B", 1},        Unit{"KB", 1e3},     Unit{"MB", 1e6},     Unit{"GB", 1e9},
      Unit{"TB", 1e12}, Unit{"KIB", 0x1p10}, Unit{"MIB", 0x1p20}, Unit{"GIB", 0x1p30}, Unit{"TIB", 0x1p40}};
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  std::string name(std::find_if(stop, end, [](char c) { return c != ' '; }), end);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  const auto unit =
      std::find_if(kUnits.begin(), kUnits.end(), [&](const Unit& one) { return one.name == name; });
  const double bytes = unit == kUnits.end() ? 0 : value * unit->bytes;
  if (error != std::errc() || !(bytes >= 1 && bytes < 0x1p62) || (name.empty() && !bare_bytes))
    throw ConfigError(option, " ", text.empty() ? "''" : text, ": expected a size ",
                      name.empty() && !bare_bytes ? "with its unit, " : "", "such as 5GB (10^9 bytes), 500MB",
                      bare_bytes ? ", 2GiB (2^30) or a number of bytes" : " or 2GiB (2^30)");
  return static_cast<int64_t>(bytes);
}

}  // namespace tessera::tools

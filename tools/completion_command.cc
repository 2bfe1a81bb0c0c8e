#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/str.h"
#include "tools/commands.h"
#include "tools/common/command_line.h"

namespace tessera::tools {
namespace {

std::vector<const CLI::Option*> shown_options(const CLI::App& command, bool positional) {
  std::vector<const CLI::Option*> shown;
  for (const CLI::Option* option : command.get_options())
    if (option->get_positional() == positional && !option->get_group().empty()) shown.push_back(option);
  return shown;
}

bool takes_value(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

std::string value_of(const CLI::Option& option) {
  if (!takes_value(option)) return "";
  if (!option.get_option_text().empty()) return option.get_option_text();
  return option.get_expected_min() == 0 ? "[" + option.get_type_name() + "]" : option.get_type_name();
}

std::string replaced(std::string text, const std::string& special, const std::string& before) {
  for (size_t at = 0; (at = text.find_first_of(special, at)) != text.npos; at += before.size() + 1)
    text.insert(at, before);
  return text;
}

std::string words_of(const CLI::App& command) {
  std::vector<std::string> words;
  for (const CLI::Option* option : shown_options(command, false))
    for (const std::string& name : shown_names(*option)) words.push_back(name);
  return join(words, " ");
}

/// Options where a word begins with a dash; else files, by -o default. After `--` comes another program.
std::string bash_completion(const CLI::App& app) {
  std::vector<std::string> commands;
  std::string cases;
  for (const CLI::App* command : app.get_subcommands({})) {
    commands.push_back(command->get_name());
    cases += str("    ", command->get_name(), ") words=\"", words_of(*command), "\" ;;\n");
  }
  return str(
      "# bash completion of tessera, written by `tessera completion bash`\n_tessera() {\n"
      "  local current=\"${COMP_WORDS[COMP_CWORD]}\" words=\"\" index\n  COMPREPLY=()\n"
      "  for ((index = 2; index < COMP_CWORD; ++index)); do\n"
      "    [[ ${COMP_WORDS[index]} == -- ]] && return\n  done\n"
      "  if ((COMP_CWORD == 1)); then\n    words=\"",
      join(commands, " "), " ", words_of(app), "\"\n  elif [[ $current == -* ]]; then\n",
      "    case \"${COMP_WORDS[1]}\" in\n", cases, "    esac\n",
      "  elif [[ ${COMP_WORDS[1]} == completion ]]; then\n    words=\"bash zsh man\"\n  fi\n"
      "  mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")\n}\n"
      "complete -o default -F _tessera tessera\n");
}

std::string quoted_for_zsh(const std::string& text) {
  std::string out;
  for (const char c : replaced(text, "[]:\\", "\\"))
    out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out;
}

std::string zsh_arguments(const CLI::App& command) {
  std::string out;
  for (const CLI::Option* option : shown_options(command, false))
    for (const std::string& name : shown_names(*option)) {
      const bool repeats = option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll ||
                           option->get_trigger_on_parse();
      const char* const joint = !takes_value(*option) ? "" : name.starts_with("--") ? "=" : "+";
      const std::string value = takes_value(*option) ? str(option->get_expected_min() == 0 ? "::" : ":",
                                                           quoted_for_zsh(value_of(*option)), ":_files")
                                                     : "";
      out += str(" \\\n        '", repeats ? "*" : "", name, joint, "[",
                 quoted_for_zsh(option->get_description()), "]", value, "'");
    }
  return out;
}

std::string zsh_completion(const CLI::App& app) {
  std::string commands, cases;
  for (const CLI::App* command : app.get_subcommands({})) {
    commands += str("    '", command->get_name(), ":", quoted_for_zsh(command->get_description()), "'\n");
    const char* const rest =
        command->get_name() == "completion" ? "1:program:(bash zsh man)" : "*:file:_files";
    cases += str("    ", command->get_name(), ")\n      _arguments", zsh_arguments(*command),
                 " \\\n        '", rest, "' ;;\n");
  }
  return str(
      "#compdef tessera\n# zsh completion of tessera, written by `tessera completion zsh`\n"
      "_tessera() {\n  local -a commands=(\n",
      commands,
      "  )\n  if ((CURRENT == 2)); then\n    _describe command commands\n    return\n  fi\n"
      "  if (( ${words[(I)--]} > 0 && ${words[(I)--]} < CURRENT )); then\n    _files\n    return\n  fi\n"
      "  shift words\n  ((CURRENT--))\n  case $words[1] in\n",
      cases, "  esac\n}\n",
      "if [[ $funcstack[1] == _tessera ]]; then\n  _tessera \"$@\"\nelse\n  compdef _tessera tessera\nfi\n");
}

/// Text for troff: a backslash and a dash are themselves, and no line is a request.
std::string roff(const std::string& text) {
  const std::string escaped = replaced(replaced(text, "\\", "\\"), "-", "\\");
  return escaped.starts_with('.') || escaped.starts_with('\'') ? "\\&" + escaped : escaped;
}

std::string man_options(const CLI::App& command) {
  std::string out;
  for (const bool positional : {true, false})
    for (const CLI::Option* option : shown_options(command, positional)) {
      const std::string value = value_of(*option);
      out += str(".TP\n\\fB",
                 roff(positional ? option->get_name(true, false) : join(shown_names(*option), ", ")), "\\fR",
                 positional || value.empty() ? "" : " \\fI" + roff(value) + "\\fR", "\n",
                 roff(option->get_description()), "\n");
    }
  return out;
}

std::string man_page(const CLI::App& app) {
  std::string out =
      str(".TH TESSERA 1 \"\" \"Tessera ", TESSERA_VERSION, "\" \"User Commands\"\n.SH NAME\n",
          "tessera \\- ZeRO\\-style sharded training on libtorch\n.SH SYNOPSIS\n.B tessera\n",
          "\\fICOMMAND\\fR [\\fIOPTIONS\\fR]\n.SH OPTIONS\n", man_options(app), ".SH COMMANDS\n");
  for (const CLI::App* command : app.get_subcommands({})) {
    out += str(".SS tessera ", command->get_name(), "\n", roff(command->get_description()), ".\n",
               man_options(*command));
    if (!command->get_footer().empty()) out += str(".P\n.nf\n", roff(command->get_footer()), "\n.fi\n");
  }
  return out;
}

}  // namespace

void add_completion_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("completion", "Print what completes this command in a shell, or its manual page");
  const auto program = std::make_shared<std::string>();
  command->add_option("PROGRAM", *program, "bash, zsh or man")->required();
  command->footer(
      "tessera completion bash > ~/.local/share/bash-completion/completions/tessera\n"
      "tessera completion man > ~/.local/share/man/man1/tessera.1");
  command->callback([&app, program] {
    if (*program != "bash" && *program != "zsh" && *program != "man")
      throw ConfigError("completion ", *program, ": expected bash, zsh or man");
    std::cout << (*program == "bash"  ? bash_completion(app)
                  : *program == "zsh" ? zsh_completion(app)
                                      : man_page(app));
  });
}

}  // namespace tessera::tools

#include <unistd.h>

#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/json/json_text.h"
#include "core/log.h"
#include "core/str.h"
#include "core/utf8.h"
#include "tools/commands.h"
#include "tools/common/command_line.h"
#include "tools/common/tasks.h"
#include "train/report/progress.h"
#include "train/trained_run.h"

namespace tessera::tools {
namespace {

struct PredictFlags {
  std::string folder, tag, file, out;
  std::vector<std::string> texts, overrides;
  bool json = false;
};

/// Appends the file's lines, a text each.
void read_lines(const std::string& name, std::vector<std::string>& texts) {
  std::istringstream file;
  if (name != "-") file.str(read_data_file(name, "a file with one text per line, or - for standard input"));
  std::istream& in = name == "-" ? std::cin : file;
  const std::string shown = name == "-" ? "standard input" : name;
  int64_t num_lines = 0;
  for (std::string line; std::getline(in, line);) {
    ++num_lines;
    if (!is_utf8(line)) throw DataError(shown, ": line ", num_lines, " is not UTF-8; expected UTF-8");
    if (num_lines == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);  // byte order mark
    if (line.ends_with('\r')) line.pop_back();
    texts.push_back(line);
  }
  if (in.bad()) throw DataError(shown, ": reading failed; expected one text per line");
  if (num_lines == 0) throw DataError(shown, ": has no lines; expected one text per line");
}

std::vector<std::string> texts_of(const PredictFlags& flags) {
  std::vector<std::string> texts = flags.texts;
  for (size_t i = 0; i < texts.size(); ++i)
    if (!is_utf8(texts[i])) throw DataError("--text ", i + 1, ": is not UTF-8; expected UTF-8");
  if (!flags.file.empty()) read_lines(flags.file, texts);
  if (texts.empty())
    throw ConfigError("nothing to predict; expected --text TEXT, or --file FILE with one text per line");
  return texts;
}

bool names_tensors(const std::string& file) {
  return file.ends_with(".safetensors") || file.ends_with(".h5") || file.ends_with(".hdf5");
}

void predict_tensors(const PredictFlags& flags) {
  if (flags.file.empty())
    throw ConfigError("--out ", flags.out, ": is for tensors; expected --file FILE.safetensors beside it");
  if (flags.out.empty())
    throw ConfigError("--file ", flags.file,
                      ": holds tensors; expected --out FILE.safetensors or --out FILE.csv beside it");
  if (!flags.texts.empty() || flags.json)
    throw ConfigError("--out: is for tensors; expected neither --text nor --json beside it");
  check_output("--out", flags.out, flags.file);
  const Logger log{LogOptions{}};
  const train::TrainedRun run = train::open_run(flags.folder, 1, flags.overrides, flags.tag);
  for (const config::Section* const section : {&run.config.model, &run.config.data})
    for (const auto& [key, value] : section->json().items())
      if (key.ends_with("path"))  // what the run was made of: a file, or several
        for (const nlohmann::json& one : value.is_array() ? value : nlohmann::json::array({value}))
          if (one.is_string()) check_output("--out", flags.out, one.get<std::string>());
  const std::unique_ptr<train::Predictor> predictor = train::load_predictor(run, tasks(), log);
  std::unique_ptr<train::ProgressBar> bar;
  const auto progress = [&](int64_t done, int64_t total) {
    if (!bar)
      bar = std::make_unique<train::ProgressBar>(
          train::display_for(std::cout, STDOUT_FILENO),
          train::BarState{.description = "predict", .total = total, .unit = "samples"}, /*keep=*/false);
    bar->update(done);
  };
  const std::vector<train::PredictedTensor> tensors =
      predictor->predict_file({.input = flags.file,
                               .output = flags.out,
                               .batch_size = run.config.trainer.eval_batch_size,
                               .progress = progress});
  bar.reset();
  std::vector<std::string> held;
  for (const train::PredictedTensor& tensor : tensors)
    held.push_back(str(as_utf8(tensor.name), " ", describe_shape(tensor.shape)));
  std::cout << flags.out << ": " << join(held, ", ") << std::endl;
}

void predict(const PredictFlags& flags) {
  if (!flags.out.empty() || names_tensors(flags.file)) return predict_tensors(flags);
  const Logger log{LogOptions{}};
  const std::vector<std::string> texts = texts_of(flags);
  const train::TrainedRun run = train::open_run(flags.folder, 1, flags.overrides, flags.tag);
  const std::unique_ptr<train::Predictor> predictor = train::load_predictor(run, tasks(), log);
  for (const train::Prediction& prediction : predictor->predict(texts)) {
    std::cout << (flags.json ? json_text(prediction.answer) : prediction.line) << '\n';
  }
  std::cout.flush();
}

}  // namespace

void add_predict_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("predict", "Apply a trained model to texts or tensors of your own");
  const auto flags = std::make_shared<PredictFlags>();
  command->add_option("--text", flags->texts, "A text (repeatable)")
      ->type_name("TEXT")
      ->expected(1)
      ->take_all();
  command
      ->add_option("--file", flags->file,
                   "A file with one text per line (-: standard input), or the model's inputs as tensors: "
                   ".safetensors, .h5")
      ->type_name("FILE");
  command
      ->add_option("--out", flags->out,
                   "File for the outputs, if the inputs are tensors: .safetensors, .csv, .h5 or .pt")
      ->type_name("FILE");
  command->add_flag("--json", flags->json,
                    "Print one JSON object per text, with the keys of transformers' pipelines");
  add_run(*command, flags->folder, flags->tag);
  add_overrides(*command, flags->overrides, "Override a key of its config.json (repeatable)");
  command->footer(
      "Texts are labelled or continued by what the run has trained, tensors are given\n"
      "to its forward: docs/text_classification.md, language_model.md, own_model.md.");
  command->callback([flags] { predict(*flags); });
}

}  // namespace tessera::tools

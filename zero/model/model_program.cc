#include "zero/model/model_program.h"

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/nn/module.h>
#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::zero {
namespace {

std::string part_of(const std::string& module, const std::string& name) {
  return module.empty() ? name : str(module, ".", name);
}

/// Returns the text without what may differ between ranks.
std::string normalized(const std::string& text) {
  static const std::regex of_a_class(R"(___torch_mangle_[0-9]+\.)"), of_a_device("cuda:[0-9]+");
  return std::regex_replace(std::regex_replace(text, of_a_class, ""), of_a_device, "cuda");
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return "a tensor";
  const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
  return tessera::str(c10::toString(values.scalar_type()), " ", values.sizes(), " with the digest ", std::hex,
                      XXH3_64bits(values.const_data_ptr(), values.nbytes()));
}

/// Adds the code of a method, and of what it calls.
void add_code(const std::string& part, torch::jit::Function& method,
              std::set<const torch::jit::Function*>& visited, Program& program) {
  visit_code(method, visited, [&](torch::jit::Function& function, const torch::jit::Node* node) {
    const auto name = [&] {
      return &function == &method ? part : normalized(function.qualname().qualifiedName());
    };
    if (node == nullptr) {
      const auto graph = torch::jit::tryToGraphFunction(function)->graph();
      program.emplace_back(name(), normalized(graph->toString(/*print_source_locations=*/false)));
      return;
    }
    for (const at::Symbol attribute : node->attributeNames())  // the text has no values of constant tensors
      if (node->kindOf(attribute) == torch::jit::AttributeKind::t)
        program.emplace_back(part_of(name(), node->output()->debugName()), describe(node->t(attribute)));
  });
}

void add_attributes(const std::string& part, const torch::jit::Module& module, Program& program) {
  const auto& type = module.type();
  for (size_t slot = 0; slot < type->numAttributes(); ++slot) {
    if (type->is_parameter(slot) || type->is_buffer(slot)) continue;
    const c10::IValue value = module._ivalue()->getSlot(slot);
    std::string text;
    if (value.isTensor()) {
      text = describe(value.toTensor());
    } else if (value.isInt() || value.isDouble() || value.isBool() || value.isString() || value.isNone() ||
               value.isIntList() || value.isDoubleList() || value.isBoolList()) {
      std::ostringstream stream;
      stream.precision(17);
      stream << value;
      text = normalized(stream.str());
    } else {
      continue;  // modules are visited; of others the type is in the code
    }
    if (type->getAttributeName(slot) != "training")
      program.emplace_back(part_of(part, type->getAttributeName(slot)), text);
  }
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);)
    lines.push_back(line.substr(std::min(line.find_first_not_of(' '), line.size())));
  return lines;
}

/// The number of the first line that differs. `with_names`: of values of a graph, which follow from where
/// they are used.
size_t first_difference(const std::vector<std::string>& here, const std::vector<std::string>& there,
                        bool with_names) {
  static const std::regex of_a_value(R"(%[A-Za-z0-9_.]+)");
  const auto shown = [&](const std::string& line) {
    return with_names ? line : std::regex_replace(line, of_a_value, "%");
  };
  return static_cast<size_t>(std::ranges::mismatch(here, there, {}, shown, shown).in1 - here.begin());
}

/// "has A in act, but rank 0 has B there"
std::string difference(const Program& mine, const Program& first) {
  const auto missing = [](const Program& in, const Program& from) -> const std::string* {
    const auto found = std::find_if(in.begin(), in.end(), [&](const auto& one) {
      return std::none_of(from.begin(), from.end(),
                          [&](const auto& other) { return other.first == one.first; });
    });
    return found == in.end() ? nullptr : &found->first;
  };
  if (const std::string* const part = missing(mine, first))
    return str("has ", *part, ", and rank 0's has not");
  if (const std::string* const part = missing(first, mine))
    return str("has no ", *part, ", and rank 0's has");
  for (size_t i = 0; i < std::min(mine.size(), first.size()); ++i) {
    if (mine[i].first != first[i].first)
      return str("has ", mine[i].first, " where rank 0's has ", first[i].first);
    if (mine[i].second == first[i].second) continue;
    const std::vector<std::string> here = lines_of(mine[i].second), there = lines_of(first[i].second);
    size_t line = first_difference(here, there, /*with_names=*/false);
    if (line == here.size() && line == there.size()) line = first_difference(here, there, true);
    const auto at = [&](const std::vector<std::string>& lines) {
      return line < lines.size() ? str('"', lines[line].substr(0, 200), '"') : std::string("its end");
    };
    const std::string where = std::max(here.size(), there.size()) > 1 ? str(", line ", line + 1) : "";
    return str("has in ", mine[i].first, where, ": ", at(here), ", and rank 0's has ", at(there));
  }
  return "has another number of parts than rank 0's";
}

}  // namespace

void visit_code(torch::jit::Function& function, std::set<const torch::jit::Function*>& visited,
                const std::function<void(torch::jit::Function&, const torch::jit::Node*)>& visit) {
  const auto* const code = torch::jit::tryToGraphFunction(function);
  if (code == nullptr || !visited.insert(&function).second) return;
  visit(function, nullptr);
  const auto visit_block = [&](const auto& self, const torch::jit::Block& block) -> void {
    for (const torch::jit::Node* node : block.nodes()) {
      visit(function, node);
      if (node->hasAttribute(at::attr::Subgraph)) self(self, *node->g(at::attr::Subgraph)->block());
      for (const torch::jit::Block* inner : node->blocks()) self(self, *inner);
      if (node->kind() == at::prim::CallFunction) {
        visit_code(*node->input(0)->type()->expectRef<at::FunctionType>().function(), visited, visit);
      } else if (node->kind() == at::prim::CallMethod) {
        const auto type = node->input(0)->type()->cast<at::ClassType>();
        if (!type || type->is_module()) continue;
        if (auto* const method = type->findMethod(node->s(at::attr::name)))
          visit_code(*method, visited, visit);
      }
    }
  };
  visit_block(visit_block, *code->graph()->block());
}

Program program_of(const torch::nn::Module& model) {
  Program program;
  const auto add = [&](const std::string& name, const torch::nn::Module& module) {
    std::ostringstream text;
    module.pretty_print(text);
    program.emplace_back(name.empty() ? "the model itself" : name, normalized(text.str()));
  };
  add("", model);
  for (const auto& item : model.named_modules("", /*include_self=*/false)) add(item.key(), *item.value());
  return program;
}

Program program_of(const torch::jit::Module& model) {
  Program program;
  std::set<const torch::jit::Function*> visited;
  for (const auto& item : model.named_modules()) {
    for (const torch::jit::Method& method : item.value.get_methods())
      add_code(part_of(item.name, method.name()), method.function(), visited, program);
    add_attributes(item.name, item.value, program);
  }
  return program;
}

void check_same_program(const Program& mine, comm::Communicator& comm) {
  if (comm.size() == 1) return;
  using nlohmann::json;
  std::string bytes;  // in CBOR, because a part may have any bytes, and JSON's text is UTF-8
  json::to_cbor(mine, bytes);
  const int rank = comm::first_unlike(comm, "digest of the model's program",
                                      std::to_string(XXH3_64bits(bytes.data(), bytes.size())));
  if (rank == 0) return;
  const std::vector<std::string> all = comm.exchange(bytes, "the model's program");
  const auto of = [&](int one) { return json::from_cbor(all[static_cast<size_t>(one)]).get<Program>(); };
  throw CommError("rank ", rank, "'s model ", difference(of(rank), of(0)),
                  ": all ranks must build the same model, from the same files");
}

}  // namespace tessera::zero

// Constants of type Device in TorchScript programs, with the device "meta" in the place of a GPU.
#include "examples/torchscript/device_constants.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <sstream>

#include "core/files/temporary_folder.h"
#include "examples/torchscript/script_file.h"

namespace tessera::examples {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using torch::jit::Module;

std::string graph_of(const Module& model, const std::string& method = "forward") {
  return model.get_method(method).graph()->toString(/*print_source_locations=*/false);
}

/// As if it came from a file.
std::shared_ptr<Module> saved_and_loaded(const Module& model) {
  const TemporaryFolder folder("device_constants");
  const std::string path = (folder.path() / "m.pt").string();
  model.save(path);
  ScriptFile file(path);
  auto loaded = file.load();
  file.detach();
  return loaded;
}

/// Parameters, as the engine moves them.
void move_parameters(Module& model, at::Device device) {
  for (const auto& item : model.named_modules()) {
    Module part = item.value;
    for (const auto& parameter : part.named_parameters(/*recurse=*/false))
      part.setattr(parameter.name, parameter.value.to(device));
  }
}

/// What torch.jit.trace writes of an LSTM that is called without a state.
Module lstm() {
  Module layer("Lstm");
  layer.register_parameter("w_ih", at::randn({20, 4}), false);
  layer.register_parameter("w_hh", at::randn({20, 5}), false);
  layer.register_parameter("b_ih", at::randn({20}), false);
  layer.register_parameter("b_hh", at::randn({20}), false);
  layer.define(R"(
def forward(self, x):
    h = torch.zeros([1, torch.size(x, 0), 5], dtype=6, layout=None, device=torch.device("cpu"), pin_memory=False)
    c = torch.zeros([1, torch.size(x, 0), 5], dtype=6, layout=None, device=torch.device("cpu"), pin_memory=False)
    y, _0, _1 = torch.lstm(x, [h, c], [self.w_ih, self.w_hh, self.b_ih, self.b_hh], True, 1, 0., True, False, True)
    return y
)");
  Module model("Model");
  model.register_module("lstm", layer);
  model.define("def forward(self, x):\n    return self.lstm.forward(x)\n");
  return model;
}

TEST(DeviceConstants, ALstmRunsOnAnotherDevice) {
  const auto model = saved_and_loaded(lstm());
  const at::Tensor x = at::randn({2, 3, 4});
  const at::Tensor expected = model->forward({x}).toTensor();
  ASSERT_THAT(graph_of(model->attr("lstm").toModule()), HasSubstr("Device = prim::Constant[value=\"cpu\"]"));
  set_device_constants(*model, at::kCPU);
  EXPECT_TRUE(model->forward({x}).toTensor().equal(expected));

  const auto other = saved_and_loaded(lstm());
  move_parameters(*other, at::kMeta);
  EXPECT_ANY_THROW(other->forward({x.to(at::kMeta)})) << "its state is on the CPU";
  const auto third = saved_and_loaded(lstm());
  set_device_constants(*third, at::kMeta);
  move_parameters(*third, at::kMeta);
  const std::string graph = graph_of(third->attr("lstm").toModule());
  EXPECT_THAT(graph, HasSubstr("Device = prim::Constant[value=\"meta\"]"));
  EXPECT_THAT(graph, Not(HasSubstr("\"cpu\"")));
  const at::Tensor y = third->forward({x.to(at::kMeta)}).toTensor();
  EXPECT_TRUE(y.is_meta());
  EXPECT_EQ(y.sizes(), (std::vector<int64_t>{2, 3, 5}));
}

/// A device wherever a program may name one. (Sizes are computed: libtorch folds and compares constants,
/// which it cannot do on the device "meta".)
Module program() {
  Module model("Program");
  model.register_parameter("w", at::ones({3}), false);
  model.register_attribute("place", c10::DeviceObjType::get(), at::Device(at::kCPU));
  model.register_attribute("table", c10::OptionalType::ofTensor(), at::ones({3}));
  model.register_attribute("tables", c10::ListType::ofTensors(), c10::List<at::Tensor>({at::ones({3})}));
  model.define(R"(
def offset(self, x, device: Device = torch.device("cpu")):
    return torch.ones([torch.size(x, 0)], device=device)

def forward(self, x, times: int):
    y = x * self.w
    for i in range(times):
        if i == 0:
            y = y + torch.arange(torch.size(x, 0), device="cpu")
        else:
            y = y + torch.zeros([torch.size(x, 0)], device=torch.device("cuda", 1)).to(torch.device("cpu:0"))
    table = self.table
    if table is not None:
        y = y + table
    return y + self.offset(x) + self.tables[0] + torch.ones([torch.size(x, 0)], device=self.place)
)");
  return model;
}

TEST(DeviceConstants, AreFoundWhereverAProgramNamesADevice) {
  const auto model = saved_and_loaded(program());
  set_device_constants(*model, at::kMeta);
  move_parameters(*model, at::kMeta);
  const at::Tensor x = at::ones({3}, at::kMeta);
  EXPECT_TRUE(model->forward({x, 3}).toTensor().is_meta());
  EXPECT_TRUE(model->get_method("offset")({x}).toTensor().is_meta()) << "the default argument";
  EXPECT_EQ(model->attr("place").toDevice(), at::Device(at::kMeta));
  for (const char* method : {"forward", "offset"}) {
    EXPECT_THAT(graph_of(*model, method), Not(HasSubstr("Device = prim::Constant[value=\"cpu")));
    EXPECT_THAT(graph_of(*model, method), Not(HasSubstr("aten::device(")));
  }
}

TEST(DeviceConstants, ADeviceThatIsComputedOrMetaStays) {
  Module model("Model");
  model.define(R"(
def forward(self, name: str):
    return torch.ones([3], device=torch.device(name)), torch.ones([3], device=torch.device("meta"))
)");
  const auto loaded = saved_and_loaded(model);
  set_device_constants(*loaded, at::Device(at::kCUDA, 0));  // only named: nothing is made there
  const std::string graph = graph_of(*loaded);
  EXPECT_THAT(graph, HasSubstr("aten::device(%name"));
  EXPECT_THAT(graph, HasSubstr("meta"));
  EXPECT_THAT(graph, Not(HasSubstr("cuda")));
}

TEST(DeviceConstants, OnTheCpuAProgramRunsThatWasMadeForAGpu) {
  const auto model = saved_and_loaded(program());
  set_device_constants(*model, at::kCPU);
  EXPECT_EQ(model->forward({at::ones({3}), 2}).toTensor().sum().item<float>(), 3 * (1 + 1 + 1 + 1 + 1) + 3);
}

/// Adds `constants` to what forward gives, as a trace does with tensors that it found.
void add_constants(Module& model, const std::vector<at::Tensor>& constants) {
  torch::jit::Graph& graph = *model.get_method("forward").graph();
  const torch::jit::WithInsertPoint here(graph.return_node());
  for (const at::Tensor& constant : constants)
    graph.return_node()->replaceInput(
        0, graph.insert(c10::aten::add, {graph.return_node()->input(0), graph.insertConstant(constant)}));
}

TEST(DeviceConstants, TensorsMoveUnlessTheyHaveNoDimensions) {
  Module model("Model");
  model.register_parameter("w", at::ones({3}), false);
  model.define("def forward(self, x):\n    return x * self.w\n");
  const at::Tensor table = at::ones({3});
  add_constants(model, {table, at::scalar_tensor(2)});
  const auto loaded = saved_and_loaded(model);
  set_device_constants(*loaded, at::kMeta);
  move_parameters(*loaded, at::kMeta);
  EXPECT_TRUE(loaded->forward({at::ones({3}, at::kMeta)}).toTensor().is_meta());
  std::vector<at::Tensor> found;
  for (torch::jit::Node* node : loaded->get_method("forward").graph()->nodes())
    if (node->kind() == c10::prim::Constant && node->output()->type()->isSubtypeOf(*c10::TensorType::get()))
      found.push_back(torch::jit::toIValue(node->output())->toTensor());
  ASSERT_EQ(found.size(), 2u);
  for (const at::Tensor& tensor : found) EXPECT_EQ(tensor.is_meta(), tensor.dim() == 1);
}

TEST(DeviceConstants, TheLengthsOfAPackedSequenceAreOnTheCpu) {
  Module model("Model");
  model.register_parameter("w", at::ones({3}), false);
  model.define(R"(
def forward(self, x, n):
    lengths = torch.to(n, torch.device("cpu"), 4)
    packed, sizes = torch._pack_padded_sequence(x * self.w, lengths, True)
    return packed
)");
  const auto gpu = saved_and_loaded(model);
  set_device_constants(*gpu, at::Device(at::kCUDA, 0));
  EXPECT_THAT(graph_of(*gpu), ::testing::ContainsRegex("(%[0-9]+) : Tensor = aten::cpu\\(%lengths"));
  const auto cpu = saved_and_loaded(model);
  set_device_constants(*cpu, at::kCPU);
  EXPECT_THAT(graph_of(*cpu), Not(HasSubstr("aten::cpu")));
}

}  // namespace
}  // namespace tessera::examples

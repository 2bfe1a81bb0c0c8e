// The segmentation example for the tests in Python:
//   segmentation_tool decode FILE colours|indices   -> "WIDTH HEIGHT CHANNELS\n" and the bytes, on stdout
//   segmentation_tool encode WIDTH HEIGHT CHANNELS FILE   the bytes from stdin
//   segmentation_tool sample IMAGES MASKS SCALE INDEX   -> "WIDTH HEIGHT\n", the image's bytes (3, H, W), the
//   mask's (H, W) segmentation_tool unet FILE.json   {in_channels, num_classes, base_channels, depth,
//   bilinear, weights, input, target, shape, out}: files
//       of fp32 in OUT/: eval and train (logits), loss, and NAME for each gradient and buffer after the
//       training pass; names on stdout
#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "comm/init/init.h"
#include "core/error.h"
#include "engine/engine.h"
#include "examples/segmentation/image_folder.h"
#include "examples/segmentation/losses.h"
#include "examples/segmentation/model.h"

namespace tessera::examples {
namespace {

void put(std::ostream& out, const void* bytes, size_t size) {
  out.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
}

void decode(const std::string& path, const std::string& palette) {
  const Image image = read_image(path, palette == "indices" ? Palette::kIndices : Palette::kColours);
  std::cout << image.width << ' ' << image.height << ' ' << image.channels << '\n';
  put(std::cout, image.pixels.data(), image.pixels.size());
}

void encode(const std::vector<std::string>& args) {
  Image image{std::stoll(args[1]), std::stoll(args[2]), std::stoll(args[3]), {}};
  image.pixels.assign(std::istreambuf_iterator<char>(std::cin), {});
  write_png(args[4], image);
}

void sample(const std::vector<std::string>& args) {
  ImageFolderOptions options;
  options.images = args[1];
  options.masks = args[2];
  options.scale = std::stod(args[3]);
  const ImageFolder data(options);
  const SegmentationSample one = data.sample(std::stoll(args[4]));
  std::cout << data.width() << ' ' << data.height() << '\n';
  put(std::cout, one.image.const_data_ptr(), one.image.nbytes());
  put(std::cout, one.mask.const_data_ptr(), one.mask.nbytes());
}

at::Tensor load(const std::string& path, at::IntArrayRef shape, at::ScalarType type) {
  const at::Tensor tensor = at::empty(shape, type);
  std::ifstream file(path, std::ios::binary);
  if (!file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes())))
    throw DataError(path + ": too short");
  return tensor;
}

void unet(const nlohmann::json& job) {
  const UNetOptions options{job.at("in_channels"), job.at("num_classes"), job.at("base_channels"),
                            job.at("depth"), job.at("bilinear")};
  const std::vector<int64_t> shape = job.at("shape");
  const at::Tensor input = load(job.at("input"), shape, at::kFloat);
  const at::Tensor target = load(job.at("target"), {shape[0], shape[2], shape[3]}, at::kLong);
  const std::filesystem::path out = job.at("out").get<std::string>();
  const auto save = [&](const std::string& name, const at::Tensor& tensor) {
    const at::Tensor values = tensor.detach().to(at::kFloat).contiguous();
    std::ofstream file(out / name, std::ios::binary);
    put(file, values.const_data_ptr(), values.nbytes());
  };
  UNet model(options);
  std::vector<std::string> names;
  for (const auto& parameter : model->named_parameters()) names.push_back(parameter.key());
  for (const auto& buffer : model->named_buffers()) std::cout << buffer.key() << '\n';
  for (const std::string& name : names) std::cout << name << '\n';
  comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
    EngineConfig config;
    config.train_micro_batch_size_per_gpu = shape[0];
    config.zero.stage = 3;
    const auto engine = initialize(model, config, comm);
    engine->load_weights(job.at("weights"));
    engine->eval();
    {
      const at::NoGradGuard no_grad;
      save("eval", engine->forward(input));
    }
    engine->train();
    const at::Tensor logits = engine->forward(input);
    const at::Tensor loss = segmentation_loss(logits, target);
    save("train", logits);
    save("loss", loss);
    engine->backward(loss);
    for (const std::string& name : names) save(name, engine->full_gradient(name));
    for (const auto& buffer : model->named_buffers()) save(buffer.key(), buffer.value());
  });
}

void run(const std::vector<std::string>& args) {
  if (args.size() == 3 && args[0] == "decode") return decode(args[1], args[2]);
  if (args.size() == 5 && args[0] == "encode") return encode(args);
  if (args.size() == 5 && args[0] == "sample") return sample(args);
  if (args.size() == 2 && args[0] == "unet") {
    std::ifstream file(args[1]);
    return unet(nlohmann::json::parse(file));
  }
  throw ConfigError("usage: segmentation_tool decode|encode|sample|unet …");
}

}  // namespace
}  // namespace tessera::examples

int main(int argc, char** argv) try {
  tessera::examples::run({argv + 1, argv + argc});
  return 0;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}

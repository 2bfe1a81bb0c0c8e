#include "tools/common/tasks.h"

#include "examples/fashion_mnist/task.h"
#include "examples/language_model/task.h"
#include "examples/segmentation/task.h"
#include "examples/text_classification/task.h"
#include "examples/torchscript/task.h"

namespace tessera::tools {

train::Registry tasks() {
  train::Registry registry;
  examples::register_fashion_mnist(registry);
  examples::register_language_model(registry);
  examples::register_segmentation(registry);
  examples::register_torchscript(registry);
  examples::register_text_classification(registry);
  return registry;
}

}  // namespace tessera::tools

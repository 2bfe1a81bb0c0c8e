#include "zero/operators/per_operator.h"

namespace tessera::zero {
namespace {

class Listener final : public c10::OpRegistrationListener {
 public:
  explicit Listener(std::function<void(const char*)> function) : function_(std::move(function)) {}
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {  // its schema is still there
    function_(op.schema().name().c_str());
  }

 private:
  std::function<void(const char*)> function_;
};

}  // namespace

c10::RegistrationHandleRAII when_an_operator_goes(std::function<void(const char* name)> function) {
  return c10::Dispatcher::singleton().addRegistrationListener(
      std::make_unique<Listener>(std::move(function)));
}

}  // namespace tessera::zero

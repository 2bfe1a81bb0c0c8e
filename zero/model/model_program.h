// What a model computes, apart from the values of its tensors: so that ranks find out that they have built
// different models with equal parameters, such as one from a stale file.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Function;
struct Module;
struct Node;
}  // namespace torch::jit

namespace tessera::zero {

/// Has a description by part of the model, in its order: "fc1" -> "torch::nn::Linear(in_features=8, …)". A
/// value may have several lines. What may differ between ranks that have the same model is not in it: numbers
/// of devices, and the numbers that TorchScript gives to classes of one name.
using Program = std::vector<std::pair<std::string, std::string>>;

/// Calls `visit` with a function and null, then with each node of its code, and in between with what that
/// calls: functions, and methods of classes that are no modules. Each of `visited` once. (Whoever looks at a
/// model visits the methods of all its modules.)
void visit_code(torch::jit::Function& function, std::set<const torch::jit::Function*>& visited,
                const std::function<void(torch::jit::Function&, const torch::jit::Node*)>& visit);

/// The module tree, each module as it prints itself. (Of compiled code nothing else is known.)
Program program_of(const torch::nn::Module& model);
/// The code of all methods and of the functions that they call, with constants, and attributes that
/// are neither parameters nor buffers.
Program program_of(const torch::jit::Module& model);

/// Collective. Compares the ranks' programs. Throws CommError, the same on all ranks, with the first part
/// that differs, a rank, and what both have.
void check_same_program(const Program& mine, comm::Communicator& comm);

}  // namespace tessera::zero

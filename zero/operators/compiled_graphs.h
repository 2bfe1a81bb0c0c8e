// [Note: compiled graphs] A graph that AOTAutograd has compiled reads raw pointers: of its operators only
// some are heard (inductor's matrix products). But it runs inside of one autograd function, which is heard:
// CompiledFunction, with every tensor of the graph among its inputs, parameters included. That is a read of
// all of them, which stay unsharded until it ends. Its backward, the node CompiledFunctionBackward with the
// same sequence number, reads parameters among the tensors that were saved, and has none among its inputs:
// the units that its forward has read are gathered again. Without autograd (under no_grad, or where neither a
// parameter nor an input of the graph requires a gradient, as in a frozen part) there is no such function,
// and nothing is heard: the Python package then announces inductor's graphs (CompiledGraphRead), which is a
// read of all parameters among their inputs. A graph that neither has announced gets an error from data_ptr()
// (see unit_memory.h).
#pragma once

#include <string_view>

namespace tessera::zero {

inline constexpr std::string_view kCompiledForward = "CompiledFunction";
inline constexpr std::string_view kCompiledBackward = "CompiledFunctionBackward";
inline constexpr std::string_view kCompiledGraphRead = "CompiledGraphRead";

}  // namespace tessera::zero

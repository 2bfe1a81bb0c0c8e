// Devices that a TorchScript program names.
//
// Device constants.
// A trace has the device it was made on as a constant wherever forward makes a tensor: the initial state of
// an LSTM, arange(), zeros(), to(). Moving parameters and buffers does not change it, so a model that was
// traced on a CPU fails on a GPU ("input at cuda:0 and hidden tensor at cpu"), and one traced on cuda:1 fails
// on cuda:0. So these constants are set to the device that the model trains on.
#pragma once

#include <c10/core/Device.h>

namespace torch::jit {
struct Module;
}

namespace tessera::examples {

/// In all functions of the module's program (its submodules', and what they call) sets each constant
/// of type Device, torch.device(…) of a constant, and each default argument of type Device to `device`, and
/// moves tensors that are constants there; likewise values of attributes that are neither parameters nor
/// buffers. Left as they are: the device "meta"; tensors without dimensions, which operators take from the
/// CPU as they are and which sizes are computed from (on a device each would have to be waited for); devices
/// that are computed. The lengths of a packed sequence, which have to be on the CPU, are moved there. To be
/// called before the module runs.
void set_device_constants(torch::jit::Module& module, c10::Device device);

}  // namespace tessera::examples

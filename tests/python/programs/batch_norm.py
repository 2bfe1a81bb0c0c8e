"""Batch normalization on CUDA helps itself. Tensors that have no values stand for the device's: what arrives at libtorch's operator is what
that takes on CUDA."""
import tessera
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Arrived(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if "batch_norm" in function.name():  # the native one, or cuDNN's
            arrived.append([tensor.dtype for tensor in arguments[:5] if isinstance(tensor, torch.Tensor)])
        return function(*arguments, **(options or {}))

def dtypes(input_dtype, weight_dtype, statistics_dtype, grad=True):
    arrived.clear()
    with FakeTensorMode(), Arrived():
        x = torch.empty(4, 8, 5, 5, device="cuda", dtype=input_dtype)
        vectors = [torch.empty(8, device="cuda", dtype=dtype) for dtype in (statistics_dtype,) * 2 + (weight_dtype,) * 2 if dtype]
        for tensor in (x, *vectors[2:]):
            tensor.requires_grad_(grad)
        y = torch.nn.functional.batch_norm(x, *vectors, training=True)
    assert y.dtype == input_dtype and (y.grad_fn is not None) == grad
    return arrived[-1]

arrived, half, single = [], torch.bfloat16, torch.float32
assert dtypes(half, half, single) == [half, half, half, single, single]  # CUDA's kernel raises
tessera.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "SGD"}})
for grad in (True, False):
    assert dtypes(half, half, single, grad) == [half, single, single, single, single]
assert dtypes(single, half, single) == [single] * 5
assert dtypes(half, None, single) == [half, single, single]
for same in ((half, half, half), (half, single, single), (single, single, single)):
    assert dtypes(*same) == [same[0], same[1], same[1], same[2], same[2]], same

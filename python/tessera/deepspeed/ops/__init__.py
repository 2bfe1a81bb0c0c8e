"""`deepspeed.ops`: DeepSpeed's optimizers as optimizers of torch.

`initialize` translates them, as it does torch's: the engine updates by the same formula. Outside of an engine their `step` computes it by
torch's operators; DeepSpeed's compiled kernels are not here.
"""
from tessera.deepspeed.ops.op_builder import COMPATIBLE_OPS as __compatible_ops__  # noqa: F401  DeepSpeed's name

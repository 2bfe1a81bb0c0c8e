"""`deepspeed.git_version_info`: versions, and which operators are there."""
import torch

from tessera.deepspeed import __version__ as version  # noqa: F401  DeepSpeed's name
from tessera.deepspeed.ops.op_builder import COMPATIBLE_OPS

git_hash = git_branch = "[none]"
installed_ops = compatible_ops = COMPATIBLE_OPS
accelerator_name = ""
torch_info = {"version": ".".join(torch.__version__.split(".")[:2]), "bf16_support": True, "cuda_version": torch.version.cuda or "0.0",
              "nccl_version": "0.0", "hip_version": "0.0"}

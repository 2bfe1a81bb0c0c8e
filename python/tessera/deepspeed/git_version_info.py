"""`deepspeed.git_version_info`: versions, and which operators are there."""
import torch

from tessera.deepspeed.ops.op_builder import COMPATIBLE_OPS

version, git_hash, git_branch = "0.19.8", "[none]", "[none]"
installed_ops = compatible_ops = COMPATIBLE_OPS
accelerator_name = ""
torch_info = {"version": ".".join(torch.__version__.split(".")[:2]), "bf16_support": True, "cuda_version": torch.version.cuda or "0.0",
              "nccl_version": "0.0", "hip_version": "0.0"}

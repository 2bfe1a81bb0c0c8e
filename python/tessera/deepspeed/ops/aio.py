"""`deepspeed.ops.aio`: the name of what reads and writes files; `offload_…: {"device": "nvme"}` needs none of it."""
from tessera.deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

__all__ = ["AsyncIOBuilder", "GDSBuilder"]

"""`deepspeed.ops.op_builder`: which of DeepSpeed's operators are there.

DeepSpeed compiles its operators when they are first used; Tessera's are built in. So a builder here answers for its name, and loads
nothing: `CPUAdamBuilder.NAME`, `CPUAdamBuilder().is_compatible()`.
"""
from typing import Any

from tessera import _engine


class OpBuilder:
    """Answers for an operator.

    Attributes
    ----------
    NAME : str
    """

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the engine has what it is for. `verbose`: a warning says so where it has not."""
        is_there = COMPATIBLE_OPS.get(self.NAME, False)
        if verbose and not is_there:
            _engine.log_warning(f"{self.NAME} is not in Tessera's stand-in for DeepSpeed")
        return is_there

    def builder_available(self) -> bool:
        """As `is_compatible`."""
        return self.is_compatible()

    def load(self, verbose: bool = True) -> Any:
        """Raises ImportError: nothing is compiled at run time."""
        raise ImportError(f"{type(self).__name__}.load(verbose={verbose}): Tessera's stand-in for DeepSpeed compiles no operators at run time; tessera's own are "
                          "built in")

    jit_load = load


_NAMES = {"AsyncIOBuilder": "async_io", "CPUAdagradBuilder": "cpu_adagrad", "CPUAdamBuilder": "cpu_adam", "CPULionBuilder": "cpu_lion",
          "FusedAdamBuilder": "fused_adam", "FusedLambBuilder": "fused_lamb", "FusedLionBuilder": "fused_lion", "FPQuantizerBuilder": "fp_quantizer",
          "GDSBuilder": "gds", "InferenceBuilder": "transformer_inference", "QuantizerBuilder": "quantizer",
          "RandomLTDBuilder": "random_ltd", "SparseAttnBuilder": "sparse_attn", "SpatialInferenceBuilder": "spatial_inference",
          "StochasticTransformerBuilder": "stochastic_transformer", "TransformerBuilder": "transformer", "UtilsBuilder": "utils"}
_BUILT_IN = {"async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion", "utils"}
COMPATIBLE_OPS = {name: name in _BUILT_IN for name in _NAMES.values()}
ALL_OPS = {}
for _class_name, _name in _NAMES.items():
    globals()[_class_name] = type(_class_name, (OpBuilder,), {"NAME": _name, "__doc__": f"Answers for {_name}.", "__module__": __name__})
    ALL_OPS[_name] = globals()[_class_name]()

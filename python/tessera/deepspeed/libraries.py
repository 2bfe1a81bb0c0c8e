"""What Accelerate and transformers do otherwise with Tessera in DeepSpeed's place."""
import functools
import importlib
import logging
import os
from contextlib import contextmanager

import torch

from tessera import zero
from tessera.deepspeed.comm import init_distributed
from tessera.deepspeed.runtime.zero.partition_parameters import mark_parameters
from tessera.errors import Error

_transformers_log = logging.getLogger("transformers.modeling_utils")


def teach_accelerate_ranks_on_cpus():
    """Accelerate has DeepSpeed on devices only: without one it takes each process for a group of its own. Where it is told to use the CPU, by
    `cpu=True` or ACCELERATE_USE_CPU, it trains without DeepSpeed and without a word."""
    try:
        from accelerate.state import AcceleratorState, DistributedType, PartialState
        from accelerate.utils import parse_flag_from_env
    except ImportError:
        return
    make, prepare = AcceleratorState.__init__, PartialState._prepare_backend

    def uses_deepspeed():
        return os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"

    @functools.wraps(make)
    def make_with_cpus(self, mixed_precision=None, cpu=False, *args, **kwargs):
        if not (uses_deepspeed() and (cpu or parse_flag_from_env("ACCELERATE_USE_CPU"))):
            return make(self, mixed_precision, cpu, *args, **kwargs)
        if torch.cuda.is_available():
            raise Error("Accelerate is told to use the CPU (cpu=True, or ACCELERATE_USE_CPU) beside DeepSpeed, and this machine has a GPU; expected "
                        "one of the two, or CUDA_VISIBLE_DEVICES=\"\" for ranks on CPUs")
        variable = os.environ.pop("ACCELERATE_USE_CPU", None)
        try:
            return make(self, mixed_precision, False, *args, **kwargs)
        finally:
            if variable is not None:
                os.environ["ACCELERATE_USE_CPU"] = variable

    def prepare_with_cpus(self, *args, **kwargs):
        backend, kind = prepare(self, *args, **kwargs)
        is_rank = bool(os.environ.get("LOCAL_RANK")) and uses_deepspeed()
        return ("gloo", DistributedType.MULTI_CPU) if backend is None and is_rank else (backend, kind)

    AcceleratorState.__init__, PartialState._prepare_backend = make_with_cpus, prepare_with_cpus


def teach_transformers_to_load_on_every_rank():
    """Under a stage 3 configuration transformers reads weights, and draws initial ones, on rank 0 alone, and in another order of draws.
    Here every rank does what it does under the other stages: so the weights have the same bits at every stage, and every rank has them,
    with an engine or without. What ranks have drawn differently becomes rank 0's. transformers is taught when its configuration object
    is made, because importing this module does not import it."""
    try:
        from accelerate.utils.deepspeed import HfDeepSpeedConfig
    except ImportError:
        return
    make = HfDeepSpeedConfig.__init__

    @functools.wraps(make)
    def make_and_teach(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if any(base.__module__.startswith("transformers.") for base in type(self).__mro__):
            _load_on_every_rank(importlib.import_module("transformers.modeling_utils").PreTrainedModel,
                                importlib.import_module("transformers.integrations.deepspeed"))

    HfDeepSpeedConfig.__init__ = make_and_teach


def _load_on_every_rank(model_class, integration):
    if hasattr(model_class, "__tessera__"):
        return
    model_class.__tessera__ = True

    @contextmanager
    def without_configuration():
        kept, integration._hf_deepspeed_config_weak_ref = integration._hf_deepspeed_config_weak_ref, None
        try:
            yield
        finally:
            integration._hf_deepspeed_config_weak_ref = kept

    def taught(function, modules_of):
        @functools.wraps(function)
        def call(self_or_class, *args, **kwargs):
            if not integration.is_deepspeed_zero3_enabled():
                return function(self_or_class, *args, **kwargs)
            if modules_of is not None:
                _transformers_log.info("Detected DeepSpeed ZeRO-3: activating zero.init() for this model")  # transformers' own words
                init_distributed()
            with without_configuration():
                result = function(self_or_class, *args, **kwargs)
            for module in modules_of(self_or_class, result) if modules_of is not None else ():
                zero.share_values((*module.named_parameters(), *module.named_buffers()), what=f"a {type(module).__name__}")
                mark_parameters(module.parameters())
            return result
        return call

    def embeddings(model):
        return [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]

    for name in ("from_pretrained", "_from_config"):
        setattr(model_class, name, classmethod(taught(getattr(model_class, name).__func__,
                                                      lambda _, result: [result[0] if isinstance(result, tuple) else result])))
    model_class.resize_token_embeddings = taught(model_class.resize_token_embeddings, lambda model, _: embeddings(model))
    model_class.init_weights = taught(model_class.init_weights, None)  # of a constructor that is called directly

"""In every process of a peer's tests: `import deepspeed` is tessera.deepspeed, and test modules can be imported.

DeepSpeed's test modules import some names, at their top, that Tessera does not have: its internals, and what it refuses. They would
then not be collected, with all of their tests. So such a name, out of TESSERA_PEER_NAMES (JSON: module -> names), stands for a class that
cannot be used. A test that uses it fails. What they compare with is torch's DistributedDataParallel on device_ids=[rank], which CPU ranks
have not: those arguments are left out. Their checkpoint tests sort parameters into groups of experts, which a model without experts has
not: one group comes back; they watch that a method of DeepSpeed's is not called; and a layer's size is one of its constants.
"""
import importlib
import json
import os
import sys
import types


def _absent(name):
    def refuse(*arguments, **keywords):
        raise ImportError(f"{name} is not in tessera.deepspeed")

    return type(name.rpartition(".")[2], (), {"__init__": refuse, "__doc__": f"{name} is absent."})


def _module(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        module = types.ModuleType(name)
        parent, _, child = name.rpartition(".")
        setattr(_module(parent), child, module)
        sys.modules[name] = module
        return module


def _failed_outcomes_are_exceptions():
    """`pytest.fail` raises a BaseException, which would end a rank's process, and its test would wait for it without an end."""
    from multiprocessing import pool
    starmapstar = pool.starmapstar

    def of_exceptions(calls):
        try:
            return starmapstar(calls)
        except Exception:
            raise
        except BaseException as outcome:
            raise AssertionError(str(outcome)) from None

    of_exceptions.__module__, of_exceptions.__qualname__ = starmapstar.__module__, starmapstar.__qualname__
    pool.starmapstar = of_exceptions


def _without_device_ids():
    from torch.nn.parallel import DistributedDataParallel
    init = DistributedDataParallel.__init__

    def on_cpu(self, module, device_ids=None, output_device=None, **keywords):
        init(self, module, **keywords)

    DistributedDataParallel.__init__ = on_cpu


if "TESSERA_PEER_NAMES" in os.environ:
    import tessera.deepspeed  # noqa: F401

    _failed_outcomes_are_exceptions()
    _without_device_ids()
    _module("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer = lambda groups: [groups]
    _module("deepspeed.runtime.swap_tensor").MIN_SWAPPABLE_BYTES = 2**20
    tessera.deepspeed.DeepSpeedEngine._get_optimizer_ckpt_name = lambda *arguments: ""

    for _name, _names in json.loads(os.environ["TESSERA_PEER_NAMES"]).items():
        _found = _module(_name)
        for _one in _names:
            if not hasattr(_found, _one):
                try:
                    importlib.import_module(f"{_name}.{_one}")
                except ImportError:
                    setattr(_found, _one, _absent(f"{_name}.{_one}"))

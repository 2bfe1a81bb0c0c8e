"""Every argument of the package's calls counts or is refused: by the calls' signatures and bodies, and by what they do."""
import ast
import inspect
import sys
import unittest
from pathlib import Path

import tessera
import tessera.data
import tessera.deepspeed
from ranks import RanksTest
from tessera import lr_scheduler

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "tessera"

# Functions that take any arguments, and what becomes of them.
FORWARDED = {
    "tessera.engine.Engine.forward": "the module's forward",
    "tessera.data.DataLoader.__init__": "torch's DataLoader, which was asked for their names",
    "tessera.launch.run_command": "the words of a command line",
    "tessera.deepspeed.runtime.activation_checkpointing.checkpointing.checkpoint": "the function's",
    "tessera.deepspeed.accelerator._Cpu.Event.__init__": "refused, whatever they are",
    "tessera.deepspeed.runtime.utils.call_to_str": "they are shown",
    "tessera.deepspeed.runtime.zero.config.DeepSpeedZeroConfig.__init__": "keys of the section, which the parser of configurations checks",
    "tessera.deepspeed.runtime.zero.offload_config._OffloadConfig.__init__": "keys of the section, which the parser of configurations checks",
    "tessera.deepspeed.runtime.zero.tiling.TiledLinear.__init__": "of the class of its parts",
}

# Arguments that a body does not read, because all values that are accepted mean the same here.
UNREAD = {
    ("zero.py", "__init__", "fwd_module"): "no parameter needs to be registered with a module",
    **{("zero.py", "__init__", name): "where DeepSpeed's shards lie; zero.Init keeps whole parameters where they are made"
       for name in ("mem_efficient_linear", "remote_device", "pin_memory", "config_dict_or_path", "config")},
}
# The same for tessera.deepspeed: DeepSpeed's arguments that have nothing to say here.
UNREAD.update({
    ("env_report.py", "main", "hide_operator_status"): "no operators are compiled at run time",
    ("env_report.py", "main", "hide_errors_and_warnings"): "no operators are compiled at run time",
    ("partition_parameters.py", "_all_gather_coalesced", "safe_mode"): "the order is checked at every collective",
    ("partition_parameters.py", "wait", "handle_dependency"): "the parameters are there",
    ("engine.py", "allreduce_gradients", "bucket_size"): "backward() has reduced",
    ("engine.py", "reload_states", "non_blocking"): "states are where the configuration has put them",
    ("engine.py", "load_module_state_dict", "fetch_z3_params"): "all parameters are gathered",
    ("engine.py", "load_module_state_dict", "z3_params_to_fetch"): "all parameters are gathered",
    ("optimizer.py", "_register_deepspeed_module", "module"): "there are no hooks",
    ("partition_parameters.py", "_all_gather", "hierarchy"): "the depth of DeepSpeed's log lines",
    ("partition_parameters.py", "_partition", "hierarchy"): "the depth of DeepSpeed's log lines",
    ("partition_parameters.py", "zero_wrapper_for_fp_tensor_constructor", "target_fp_dtype"): "constructors stay as they are",
    ("checkpointing.py", "configure", "deepspeed_config"): "the engine reads it",
    ("checkpointing.py", "configure", "num_checkpoints"): "the size of memory that is not kept",
    ("checkpointing.py", "set_num_layers", "nlayers"): "the size of memory that is not kept",
})
# What raises whatever it is called with; and methods of accelerators, which take an index of a device on a CPU as well.
REFUSING = {("optimizer_state.py", "_refuse"), ("engine.py", "scale"), ("engine.py", "offload_states"),
            ("runner.py", "main"), ("rules.py", "update"), *(("parameters.py", name) for name in (
                "safe_set_full_grad", "safe_set_local_grad", "safe_update_full_grad_vectorized"))}
OF_ACCELERATORS = {"device_index", "msg", "domain", "category", "stream", "align_bytes"}


def callables():
    """(name, function) of all that users call, methods too."""
    def of_module(name, members):
        for member, value in members.items():
            if member.startswith("_"):
                continue
            if inspect.isclass(value) and value.__module__.startswith("tessera"):
                for base in value.__mro__:
                    if not base.__module__.startswith("tessera"):
                        continue
                    for method, function in vars(base).items():
                        if inspect.isfunction(function) and (not method.startswith("_") or method in ("__init__", "__call__", "__enter__", "__iter__")):
                            yield f"{name}.{member}.{method}", function
            elif inspect.isfunction(value) and value.__module__.startswith("tessera"):
                yield f"{name}.{member}", value

    for module in (tessera, tessera.comm, tessera.zero, tessera.data, lr_scheduler):
        yield from of_module(module.__name__, vars(module))
    for name, module in list(sys.modules.items()):
        if name == "deepspeed" or name.startswith("deepspeed."):
            yield from of_module(name, vars(module))


class Signatures(unittest.TestCase):
    def test_no_function_takes_any_arguments(self):
        found = dict(callables())
        self.assertGreater(len(found), 100)
        for name, function in found.items():
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    self.assertIn(f"{function.__module__}.{function.__qualname__}", FORWARDED, f"{name}({parameter})")

    def test_every_argument_is_read(self):
        """Each parameter of each function of the package, private ones too, is a name in its body."""
        looked_at, unread = 0, []
        for path in sorted(PACKAGE.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.FunctionDef):
                    continue
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
                read = {name.id for part in node.body for name in ast.walk(part) if isinstance(name, ast.Name)}
                protocol = node.name.startswith("__") and node.name != "__init__" or node.name in ("find_spec", "find_distributions", "read_text",
                                                                                                  "locate_file")
                for argument in arguments:
                    if argument is None or argument.arg in ("self", "cls") or protocol:
                        continue
                    if argument.arg.startswith("_") and argument not in (node.args.vararg, node.args.kwarg):
                        continue  # of a function that torch calls with more than it needs
                    looked_at += 1
                    if path.name == "accelerator.py" and argument.arg in OF_ACCELERATORS:
                        continue
                    if argument.arg not in read and (path.name, node.name, argument.arg) not in UNREAD \
                            and (path.name, node.name) not in REFUSING:
                        unread.append(f"{path.name}: {node.name}({argument.arg}) is accepted and not read")
        self.assertEqual(unread, [])
        self.assertGreater(looked_at, 200)

    def test_deepspeeds_signatures(self):
        """The names and defaults of DeepSpeed 0.19.8."""
        def names(function):
            return [name for name in inspect.signature(function).parameters if name != "self"]

        engine = tessera.deepspeed.DeepSpeedEngine
        self.assertEqual(names(engine.save_checkpoint), ["save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"])
        self.assertEqual(names(engine.load_checkpoint), ["load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states",
                                                         "load_module_only", "custom_load_fn", "allow_partial_load"])
        self.assertEqual(names(engine.save_16bit_model), ["save_dir", "save_filename", "exclude_frozen_parameters"])
        self.assertEqual(inspect.signature(engine.save_16bit_model).parameters["save_filename"].default, "pytorch_model.bin")
        self.assertEqual(names(engine.backward), ["loss", "retain_graph", "scale_wrt_gas"])
        self.assertEqual(names(engine.compile), ["backend", "compile_kwargs", "schedule", "compiled_autograd_enabled"])
        self.assertEqual(names(tessera.deepspeed.initialize),
                         ["args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu",
                          "dist_init_required", "collate_fn", "config", "mesh_param", "config_params"])
        self.assertEqual(names(tessera.deepspeed.init_distributed),
                         ["dist_backend", "auto_mpi_discovery", "distributed_port", "verbose", "timeout", "init_method", "dist_init_required",
                          "config", "rank", "world_size"])


class Arguments(RanksTest):
    def test_dist_init_required_false_without_a_group(self):
        program = ("import tessera, torch; tessera.initialize(model=torch.nn.Linear(2, 2), dist_init_required=False, "
                   "config={'train_batch_size': 1})")
        (self.folder / "program.py").write_text(program)
        ((code, text),) = self.outcome([self.start(sys.executable, "program.py")])
        self.assertEqual(code, 1)
        self.assertIn("dist_init_required=False", text)


if __name__ == "__main__":
    unittest.main()

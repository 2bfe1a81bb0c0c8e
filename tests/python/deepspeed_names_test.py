"""`import deepspeed` after `import tessera.deepspeed`: the names of DeepSpeed's documentation, and what each computes."""
import argparse
import copy
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import pkgutil
import sys
import tempfile
import unittest
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import tessera
import tessera.deepspeed.__main__
import torch
from ranks import PROGRAMS, TESSERA, RanksTest, free_port, python
from torch import nn

import deepspeed  # isort: skip
from deepspeed.runtime import lr_schedules  # isort: skip

# Of DeepSpeed's docs/code-docs, and of common training scripts.
NAMES = """
initialize init_distributed add_config_arguments DeepSpeedEngine DeepSpeedConfig __version__ __version_major__ __git_hash__ get_accelerator OnDevice
log_dist logger HAS_TRITON
checkpointing.configure checkpointing.is_configured checkpointing.checkpoint checkpointing.reset
profiling.flops_profiler.get_model_profile profiling.flops_profiler.FlopsProfiler
runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live
runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold
utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint utils.zero_to_fp32.load_state_dict_from_zero_checkpoint
utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict checkpoint.utils.clone_tensors_for_torch_save
ops.adam.DeepSpeedCPUAdam ops.adam.FusedAdam ops.lamb.FusedLamb ops.lion.FusedLion ops.lion.DeepSpeedCPULion ops.adagrad.DeepSpeedCPUAdagrad
runtime.lr_schedules.LRRangeTest runtime.lr_schedules.OneCycle runtime.lr_schedules.WarmupLR runtime.lr_schedules.WarmupDecayLR
runtime.lr_schedules.WarmupCosineLR runtime.lr_schedules.VALID_LR_SCHEDULES
runtime.dataloader.RepeatingLoader utils.RepeatingLoader runtime.dataloader.DeepSpeedDataLoader
zero.Init zero.GatheredParameters zero.register_external_parameter zero.unregister_external_parameter zero.TiledLinear
runtime.zero.GatheredParameters runtime.zero.partition_parameters.GatheredParameters runtime.zero.partition_parameters.Init runtime.zero.mics.MiCS_Init
runtime.zero.unwrap_model_for_generation runtime.zero.partition_parameters.ZeroParamStatus runtime.zero.utils.is_zero_param
utils.safe_get_full_fp32_param utils.safe_get_full_grad utils.safe_get_full_optimizer_state utils.safe_get_local_fp32_param
utils.safe_get_local_grad utils.safe_get_local_optimizer_state utils.safe_set_full_fp32_param utils.safe_set_full_optimizer_state
utils.safe_set_full_grad utils.safe_set_local_fp32_param utils.safe_set_local_grad utils.safe_set_local_optimizer_state
utils.safe_update_full_grad_vectorized utils.tensor_fragment.safe_get_full_grad
utils.set_z3_leaf_modules utils.unset_z3_leaf_modules utils.get_z3_leaf_modules utils.z3_leaf_module utils.z3_leaf_parameter
utils.set_z3_leaf_module utils.set_z3_leaf_modules_by_name
utils.logger utils.log_dist utils.instrument_w_nvtx utils.groups utils.logging.logger
runtime.utils.see_memory_usage runtime.utils.clip_grad_norm_ runtime.engine.DeepSpeedEngine runtime.config.DeepSpeedConfig
runtime.zero.config.DeepSpeedZeroConfig runtime.zero.offload_config.OffloadDeviceEnum runtime.torch_autocast.is_autocast_initialized
runtime.fp16.loss_scaler.LossScaler accelerator.get_accelerator accelerator.set_accelerator
comm.init_distributed comm.is_initialized comm.get_rank comm.get_world_size comm.get_local_rank comm.all_gather comm.all_reduce comm.barrier
comm.broadcast comm.reduce comm.ReduceOp comm.all_gather_object comm.broadcast_object_list comm.new_group comm.destroy_process_group
comm.all_gather_into_tensor comm.reduce_scatter comm.reduce_scatter_tensor comm.gather comm.scatter comm.send comm.recv comm.isend comm.irecv
comm.all_to_all_single comm.get_world_group comm.get_global_rank comm.get_backend comm.monitored_barrier
comm.inference_all_reduce comm.is_available comm.group dist.get_rank
launcher.runner.DEEPSPEED_ENVIRONMENT_NAME monitor.monitor.MonitorMaster
git_version_info.torch_info ops.op_builder.FusedLambBuilder ops.op_builder.CPUAdamBuilder ops.aio.AsyncIOBuilder ops.__compatible_ops__
utils.torch.required_torch_version runtime.zero.linear.zero3_linear_wrap runtime.zero.offload_config.OffloadStateTypeEnum
""".split()
REFUSED = """
init_inference default_inference_config PipelineModule pipe.PipelineModule moe.layer.MoE inference.engine.InferenceEngine
runtime.pipe.engine.PipelineEngine sequence.layer.DistributedAttention compression.compress.init_compression linear.LoRAConfig
checkpointing.get_cuda_rng_tracker checkpointing.model_parallel_cuda_manual_seed add_tuning_arguments
runtime.lr_schedules.get_lr_from_config utils.timer.SynchronizedWallClockTimer comm.log_summary
""".split()
ACCELERATOR = """
device_name current_device_name current_device device_count set_device device synchronize is_available communication_backend_name empty_cache
memory_allocated max_memory_allocated reset_peak_memory_stats memory_reserved total_memory manual_seed manual_seed_all get_rng_state
set_rng_state is_bf16_supported is_fp16_supported supported_dtypes pin_memory is_pinned range_push range_pop on_accelerator Stream Event
default_generator is_synchronized_device FloatTensor
""".split()
EPOCHS = """
import sys, tessera.deepspeed
from transformers import AutoConfig
print(type(AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__)
"""
REMOTE_CODE = """
from transformers import PretrainedConfig
class RemoteConfig(PretrainedConfig):
    model_type = "remote"
"""
ACCELERATE = """
from pathlib import Path
import deepspeed, torch
from accelerate import Accelerator
accelerator = Accelerator()
assert accelerator.num_processes == 2 and accelerator.state.deepspeed_plugin.zero_stage == 2
model = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2),
                                               torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
for x in loader:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
assert type(model) is deepspeed.DeepSpeedEngine, type(model)
Path(f"steps{accelerator.process_index}").write_text(str(model.global_steps))
"""


SCRIPT = """
import argparse
import beside
import deepspeed
import torch
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
given = parser.parse_args()

def clipping(config):
    model = torch.nn.Linear(2, 2)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0].gradient_clipping()

config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
print("clipping", clipping(config), clipping(given.deepspeed_config), clipping({**config, "gradient_clipping": 0}), "argument",
      given.deepspeed_config, "beside", beside.value)
"""


def find(name):
    parts = ("deepspeed." + name).split(".")
    try:
        owner = importlib.import_module(".".join(parts[:-1]))
    except ModuleNotFoundError:  # an attribute of a module
        owner = deepspeed
        for part in parts[1:-1]:
            owner = getattr(owner, part)
    return getattr(owner, parts[-1])


class Names(unittest.TestCase):
    def test_each_is_there_or_refused(self):
        for name in NAMES:
            with self.subTest(name):
                find(name)
        for name in REFUSED:
            with self.subTest(name), self.assertRaisesRegex(ImportError, "Tessera's stand-in for DeepSpeed, which has no"):
                find(name)
        accelerator = deepspeed.get_accelerator()
        self.assertEqual([name for name in ACCELERATOR if not hasattr(accelerator, name)], [])
        self.assertIs(accelerator, deepspeed.accelerator.get_accelerator())

    def test_a_module_has_one_copy(self):
        """Under DeepSpeed's name and under Tessera's."""
        modules = {name: module for name, module in sys.modules.items() if name.startswith("deepspeed.")}
        self.assertGreater(len(modules), 30)
        for name, module in modules.items():
            self.assertIs(module, sys.modules[module.__name__], name)
            self.assertTrue(module.__name__.startswith("tessera.deepspeed."), name)
        self.assertIs(deepspeed, tessera.deepspeed)
        self.assertIs(deepspeed.zero, deepspeed.runtime.zero)

    def test_what_is_unknown_says_whose_it_is(self):
        self.assertFalse(hasattr(deepspeed, "no_such_name"))
        with self.assertRaisesRegex(AttributeError, "no attribute 'no_such_name': it is tessera.deepspeed, Tessera's stand-in"):
            _ = deepspeed.no_such_name
        with self.assertRaisesRegex(ModuleNotFoundError, "Tessera's stand-in"):
            importlib.import_module("deepspeed.no_such_module")
        with self.assertRaises(ImportError):
            from deepspeed.runtime.utils import no_such_function  # noqa: F401

    def test_importlib(self):
        importlib.invalidate_caches()
        for finder in sys.meta_path:
            self.assertIsNone(finder.find_spec("a_module_that_is_nowhere", None))
            if hasattr(finder, "find_distributions"):
                list(finder.find_distributions(importlib.metadata.DistributionFinder.Context(name="a-distribution-that-is-nowhere")))
        self.assertEqual(importlib.metadata.version("deepspeed"), deepspeed.__version__)
        found = importlib.metadata.distribution("DeepSpeed")
        self.assertEqual((found.name, found.files, found.requires, list(found.entry_points)), ("deepspeed", None, None, []))
        self.assertGreater(len(list(importlib.metadata.distributions())), 10)
        importlib.metadata.packages_distributions()
        importlib.metadata.entry_points()
        self.assertIsNotNone(importlib.util.find_spec("deepspeed"))
        self.assertIsNone(importlib.util.find_spec("a_module_that_is_nowhere"))
        self.assertIn("runtime", [one.name for one in pkgutil.iter_modules(deepspeed.__path__)])
        self.assertIs(importlib.import_module("deepspeed.runtime.zero.stage3"), deepspeed.runtime.zero.stage3)

    def test_versions(self):
        parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
        self.assertEqual(".".join(map(str, parts)), deepspeed.__version__)


class Schedules(unittest.TestCase):
    def test_rates_are_deepspeeds(self):
        """deepspeed_schedules.json has what DeepSpeed 0.19.8 has written into the param groups, before the first step and after each."""
        cases = json.loads(Path(__file__).with_name("deepspeed_schedules.json").read_text())
        self.assertEqual({case["type"] for case in cases}, set(lr_schedules.VALID_LR_SCHEDULES))
        for case in cases:
            with self.subTest(case["type"], **case["params"]):
                groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "lr": 5e-3}]
                optimizer = getattr(torch.optim, case["optimizer"])(groups, lr=2e-3)
                schedule = getattr(lr_schedules, case["type"])(optimizer, **case["params"])
                for rates, beta1 in zip(case["rates"], case["betas"]):
                    found = [group["lr"] for group in optimizer.param_groups]
                    for ours, theirs in zip(found, rates):
                        self.assertLessEqual(abs(ours - theirs), 1e-6 * abs(theirs))
                    self.assertEqual(schedule.get_last_lr(), found)
                    if beta1 is not None:
                        self.assertAlmostEqual(optimizer.param_groups[0]["betas"][0], beta1, places=12)
                    schedule.step()

    def test_place(self):
        def make():
            optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=1e-2)
            return optimizer, lr_schedules.WarmupDecayLR(optimizer, 20, warmup_max_lr=1e-2, warmup_num_steps=5)

        optimizer, schedule = make()
        for _ in range(8):
            schedule.step()
        self.assertEqual(schedule.state_dict(), {"last_batch_iteration": 7})
        other, resumed = make()
        resumed.load_state_dict(schedule.state_dict())
        schedule.step()
        resumed.step()
        self.assertEqual(optimizer.param_groups[0]["lr"], other.param_groups[0]["lr"])
        resumed.step(3)
        self.assertAlmostEqual(resumed.get_lr()[0], 1e-2 * math.log(4) / math.log(5), places=12)

    def test_what_is_refused(self):
        optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=1e-2)
        for arguments, part in (({"warmup_num_steps": 0}, "warmup_num_steps is 0"), ({"warmup_num_steps": 2.5}, "warmup_num_steps"),
                                ({"warmup_type": "cubic"}, "expected 'log' or 'linear'"), ({"warmup_min_lr": [0, 0]}, "2 values; expected 1")):
            with self.assertRaisesRegex(ValueError, part):
                lr_schedules.WarmupLR(optimizer, **arguments)
        with self.assertRaisesRegex(ValueError, "cycle_first_step_size"):
            lr_schedules.OneCycle(optimizer, 1e-4, 1e-3, cycle_first_step_size=0)
        with self.assertRaisesRegex(TypeError, "expected a torch.optim.Optimizer"):
            lr_schedules.WarmupLR(object())


class Optimizers(unittest.TestCase):
    def trained(self, make, dtype=torch.float32):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        optimizer = make(model.parameters())
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def test_numbers_are_torchs(self):
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        options = {"lr": 1e-2, "weight_decay": 0.1}
        for name, ours, theirs in (
                ("FusedAdam", lambda p: FusedAdam(p, **options), lambda p: torch.optim.AdamW(p, **options)),
                ("FusedAdam, L2", lambda p: FusedAdam(p, adam_w_mode=False, **options), lambda p: torch.optim.Adam(p, **options)),
                ("DeepSpeedCPUAdam", lambda p: DeepSpeedCPUAdam(p, betas=(0.8, 0.9), **options),
                 lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9), **options)),
                ("DeepSpeedCPUAdam, L2", lambda p: DeepSpeedCPUAdam(p, adamw_mode=False, **options), lambda p: torch.optim.Adam(p, **options)),
                ("DeepSpeedCPUAdagrad", lambda p: DeepSpeedCPUAdagrad(p, **options), lambda p: torch.optim.Adagrad(p, **options))):
            self.assertLess((self.trained(ours) - self.trained(theirs)).abs().max().item(), 2e-6, name)
            self.assertGreater((self.trained(ours) - self.trained(lambda p: torch.optim.SGD(p, 0.0))).abs().max().item(), 1e-3, name)

    def test_lion_and_lamb_by_their_formulas(self):
        from deepspeed.ops.lamb import FusedLamb
        from deepspeed.ops.lion import FusedLion
        value, gradients = torch.tensor([1.0, -2.0]), [torch.tensor([0.5, -0.25]), torch.tensor([-0.125, 1.0])]
        for make, formula in ((lambda p: FusedLion(p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5), self.lion),
                              (lambda p: FusedLamb(p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5, max_coeff=1.5), self.lamb)):
            parameter = nn.Parameter(value.clone())
            optimizer = make([parameter])
            for gradient in gradients:
                parameter.grad = gradient.clone()
                optimizer.step()
            torch.testing.assert_close(parameter.detach(), formula(value.double(), [g.double() for g in gradients]).float())

    def lion(self, x, gradients):
        m = torch.zeros_like(x)
        for g in gradients:
            x = x - 0.1 * (torch.sign(0.9 * m + 0.1 * g) + 0.5 * x)
            m = 0.99 * m + 0.01 * g
        return x

    def lamb(self, x, gradients):
        m = v = torch.zeros_like(x)
        for t, g in enumerate(gradients, 1):
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            update = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8) + 0.5 * x
            x = x - 0.1 * min(max((x.norm() / update.norm()).item(), 0.01), 1.5) * update
        return x

    def test_16_bits_have_fp32_states(self):
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = DeepSpeedCPUAdam([parameter], lr=0.5)  # the first step of Adam is the rate
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        self.assertEqual(optimizer.state[parameter]["exp_avg"].dtype, torch.float32)
        self.assertEqual(parameter.tolist(), [0.5] * 4)
        for make in (lambda: FusedAdam([parameter], amsgrad=True), lambda: DeepSpeedCPUAdam([parameter], amsgrad=True)):
            self.assertRaisesRegex(RuntimeError, "amsgrad", make)
        self.assertRaisesRegex(ValueError, "fp32_optimizer_states", lambda: DeepSpeedCPUAdam([parameter], fp32_optimizer_states=False))


    def test_a_resumed_run_in_16_bits_has_the_bits_of_one_that_was_not_interrupted(self):
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        from deepspeed.ops.lamb import FusedLamb
        from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

        def steps(optimizer, parameter, numbers):
            for number in numbers:
                generator = torch.Generator().manual_seed(number)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                optimizer.step()

        for kind in (FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, FusedLamb, DeepSpeedCPUAdagrad):
            for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                with self.subTest(kind=kind.__name__, dtype=dtype):
                    whole, resumed = (nn.Parameter(torch.linspace(-1, 1, 64).to(dtype)) for _ in range(2))
                    first = kind([whole], lr=0.01)
                    steps(first, whole, range(3))
                    resumed.data.copy_(whole.data)
                    second, seen = kind([resumed], lr=0.01), []
                    second.register_load_state_dict_post_hook(lambda one, seen=seen: seen.append(copy.deepcopy(list(one.state.values())[0])))
                    second.load_state_dict(copy.deepcopy(first.state_dict()))
                    for key, value in first.state[whole].items():
                        self.assertTrue(key == "step" or torch.equal(seen[0][key], value) and seen[0][key].dtype == value.dtype, key)
                    for optimizer, parameter in ((first, whole), (second, resumed)):
                        steps(optimizer, parameter, range(3, 6))
                    self.assertTrue(torch.equal(whole, resumed))
                    for key, value in first.state[whole].items():
                        self.assertTrue(torch.equal(torch.as_tensor(second.state[resumed][key]), torch.as_tensor(value)), key)

    def test_states_of_another_dtype_that_are_loaded_become_fp32(self):
        from deepspeed.ops.adam import FusedAdam
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        first, ours = FusedAdam([parameter], lr=0.5), FusedAdam([parameter], lr=0.5)
        parameter.grad = torch.ones_like(parameter)
        first.step()
        saved = first.state_dict()
        saved["state"][0]["exp_avg_sq"] = saved["state"][0]["exp_avg_sq"].bfloat16()
        ours.register_load_state_dict_pre_hook(lambda _, state: {**state, "state": {0: {**state["state"][0], "exp_avg": torch.full((4,), 0.3)}}})
        ours.load_state_dict(saved)
        ours.step()
        self.assertEqual({name: state.dtype for name, state in ours.state[parameter].items() if name != "step"},
                         {"exp_avg": torch.float32, "exp_avg_sq": torch.float32})
        torch.testing.assert_close(ours.state[parameter]["exp_avg"], torch.full((4,), 0.37))


class Configurations(unittest.TestCase):
    def test_config(self):
        config = deepspeed.DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
                                            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                                            "optimizer": {"type": "Adam", "params": {"betas": (0.8, 0.9)}}})
        self.assertEqual((config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps), (8, 4, 2))
        self.assertEqual((config.zero_enabled, config.zero_optimization_stage, config.bf16.enabled, config.optimizer_name), (True, 3, True, "adam"))
        self.assertEqual(config.zero_config.offload_optimizer.device, "cpu")
        self.assertEqual(config.optimizer_params["betas"], [0.8, 0.9])
        for bad in ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, {"train_batch_size": 1, "zero_optimisation": {}},
                    {"train_batch_size": 1, "communication_data_type": torch.float16},
                    {"train_batch_size": 1, "zero_optimization.reduce_bucket_size": math.nan}):
            self.assertRaises(deepspeed.DeepSpeedConfigError, lambda b=bad: deepspeed.DeepSpeedConfig(b))
        for given, expected in (({}, (0, 1.0)), ({"zero_optimization": True, "gradient_clipping": 0}, (1, 0.0)),
                                ({"zero_optimization": False, "max_grad_norm": 2}, (0, 2.0))):
            config = deepspeed.DeepSpeedConfig({"train_batch_size": 1, **given})
            self.assertEqual((config.zero_config.stage, config.gradient_clipping), expected, given)
        for none in ({}, {"optimizer": {}}, {"optimizer": {"type": None}}):
            self.assertIsNone(deepspeed.DeepSpeedConfig({"train_batch_size": 1, **none}).optimizer_name)

    def test_zero_config(self):
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
        from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
        config = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=12345, stage3_gather_16bit_weights_on_model_save=True)
        self.assertEqual((config.stage, config.prefetch_bucket_size, config.stage3_prefetch_bucket_size), (ZeroStageEnum.weights, 12345, 12345))
        self.assertEqual((config.gather_16bit_weights_on_model_save, config.offload_param, config.offload_optimizer), (True, None, None))
        config = DeepSpeedZeroConfig(stage=3, cpu_offload=True, offload_param={"device": "nvme", "nvme_path": "/tmp", "buffer_count": 7})
        self.assertIsInstance(config.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
        self.assertIsInstance(config.offload_param, DeepSpeedZeroOffloadParamConfig)
        self.assertEqual((config.offload_optimizer.device, config.offload_param.device, config.offload_param.buffer_count), ("cpu", "nvme", 7))
        self.assertRaises(tessera.ConfigError, lambda: DeepSpeedZeroConfig(no_such_key=1))
        self.assertRaises(tessera.ConfigError, lambda: DeepSpeedZeroConfig(stage=4))

    def test_keys_with_dots(self):
        """TRL writes "zero_optimization.reduce_bucket_size" at the top; such a key counts."""
        from tessera.deepspeed.runtime.config_keys import readable
        given = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "reduce_bucket_size": 5},
                 "zero_optimization.reduce_bucket_size": 4096, "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 64 * 63,
                 "steps_per_print": math.inf, "optimizer.params.lr": 0.5}
        before = json.dumps(given)
        self.assertEqual(readable(given), {
            "train_batch_size": 1, "zero_optimization": {"stage": 3, "reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 3628},
            "optimizer": {"params": {"lr": 0.5}}})
        self.assertEqual(json.dumps(given), before)
        self.assertRaisesRegex(tessera.ConfigError, "train_batch_size is no section", lambda: readable({"train_batch_size": 1, "train_batch_size.x": 1}))
        model = nn.Linear(2, 2)
        with self.assertRaisesRegex(tessera.ConfigError, "no_such_key"):
            deepspeed.initialize(model=model, config={"train_batch_size": 1, "zero_optimization.no_such_key": 1})
        engine = deepspeed.initialize(model=model, config={**given, "zero_optimization.stage": 2})[0]
        self.assertEqual((engine.zero_optimization_stage(), engine.zero_prefetch_bucket_size(), engine.get_lr()), (2, 3628, [0.5]))
        engine.destroy()


    def test_a_file_that_is_hjson(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "ds.json")
            for text, trained, clips in (("# gradient_clipping: 3\ntrain_batch_size: 1\noptimizer: {type: 'Adam', params: {lr: 0.5,},}", True, 1.0),
                                         ("{train_batch_size: 1\n zero_optimization: {stage: 2}\n}", False, 0.0),
                                         ('{"train_batch_size": 1, "optimizer": {"type": "Adam"}, /* "gradient_clipping": 3 */}', True, 1.0),
                                         ("train_batch_size: 1\noptimizer: {type: Adam\n}\ngradient_clipping: 0", True, 0.0)):
                path.write_text(text)
                for given in ({"config": path}, {"config": str(path)}, {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=-1)}):
                    engine = deepspeed.initialize(model=nn.Linear(2, 2), **given)[0]
                    self.assertEqual((engine.has_optimizer, engine.gradient_clipping()), (trained, clips), text)
                    engine.destroy()
            args = argparse.Namespace(deepspeed_config={"train_batch_size": 1, "zero_optimization.stage": 2})
            engine = deepspeed.initialize(args, nn.Linear(2, 2))[0]
            self.assertEqual(engine.zero_optimization_stage(), 2)
            engine.destroy()
            path.write_text("train_batch_size: 1\nzero_optimization: {stage: 2}")
            self.assertEqual(deepspeed.DeepSpeedConfig(path).zero_optimization_stage, 2)
            path.write_text("{\n  # a comment\n  train_batch_size: 1\n  bf16: {enabled: 2}\n}")
            with self.assertRaisesRegex(tessera.ConfigError, "ds.json:4: bf16.enabled: found 2"):
                deepspeed.initialize(model=nn.Linear(2, 2), config=path)
            path.write_text('{"train_batch_size": 3}  // a comment')
            self.assertEqual(deepspeed.DeepSpeedConfig(str(path)).train_batch_size, 3)
            with self.assertRaisesRegex(tessera.ConfigError, "missing.json"):
                deepspeed.DeepSpeedConfig(Path(folder, "missing.json"))


class Tools(unittest.TestCase):
    def test_repeating_loader(self):
        loader = iter(deepspeed.utils.RepeatingLoader([1, 2, 3]))
        self.assertEqual([next(loader) for _ in range(7)], [1, 2, 3, 1, 2, 3, 1])

    def test_tiled_linear_is_linear(self):
        torch.manual_seed(0)
        plain = nn.Linear(7, 5)
        x = torch.randn(3, 7)
        for splits in ({}, {"in_splits": 3}, {"out_splits": 2}, {"in_splits": 7, "out_splits": 5}):
            tiled = deepspeed.zero.TiledLinear(7, 5, init_linear=plain, **splits)
            torch.testing.assert_close(tiled(x), plain(x))
            self.assertEqual(sum(p.numel() for p in tiled.parameters()), sum(p.numel() for p in plain.parameters()))
        parts = deepspeed.zero.TiledLinear(7, 5, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False, init_linear=plain)
        torch.testing.assert_close(torch.cat(parts([x[:, :4], x[:, 4:]]), -1), plain(x))
        self.assertRaisesRegex(RuntimeError, "in_splits is 8", lambda: deepspeed.zero.TiledLinear(7, 5, in_splits=8))

    def test_on_device(self):
        with deepspeed.OnDevice(torch.bfloat16, "meta"):
            model = nn.Linear(2, 2)
        self.assertEqual((model.weight.device.type, model.weight.dtype), ("meta", torch.bfloat16))
        self.assertEqual(nn.Linear(2, 2).weight.dtype, torch.float32)

    def test_leaf_modules(self):
        utils, model = deepspeed.utils, nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
        self.assertEqual(utils.set_z3_leaf_modules(model, [nn.Linear]), [model[0], model[1][1]])
        self.assertTrue(utils.z3_leaf_module(model[0]) and utils.z3_leaf_parameter(model[0].weight))
        self.assertEqual(utils.unset_z3_leaf_modules(model, ["Linear"]), [model[0], model[1][1]])
        self.assertEqual(utils.get_z3_leaf_modules(model), [])
        self.assertFalse(utils.z3_leaf_parameter(model[0].weight))
        self.assertEqual(utils.set_z3_leaf_modules_by_name(model, ["1.1", "9"], raise_if_not_found=False), ([model[1][1]], ["9"]))
        self.assertEqual(utils.get_z3_leaf_modules(model), [model[1][1]])
        self.assertRaisesRegex(ValueError, "Conv2d", lambda: utils.set_z3_leaf_modules(model, [nn.Conv2d]))

    def test_checkpointing(self):
        torch.manual_seed(0)
        module, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(2, 4, requires_grad=True)
        results = []
        for call in (lambda: module(x), lambda: deepspeed.checkpointing.checkpoint(module, x)):
            torch.manual_seed(1)
            loss = call().square().sum()
            results.append((loss.item(), torch.autograd.grad(loss, [x])[0].tolist()))
        self.assertEqual(results[0], results[1])
        self.assertEqual(deepspeed.checkpointing.checkpoint(lambda a, scale: a * scale, x, scale=2.0).tolist(), (2 * x).tolist())
        self.assertFalse(deepspeed.checkpointing.is_configured())
        self.assertRaisesRegex(tessera.Error, "partition_activations", lambda: deepspeed.checkpointing.configure(partition_activations=True))
        deepspeed.checkpointing.configure(None)
        self.assertTrue(deepspeed.checkpointing.is_configured())

    def test_profile(self):
        flops, macs, parameters = deepspeed.profiling.flops_profiler.get_model_profile(
            nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)), (2, 8), print_profile=False, as_string=False)
        self.assertEqual((flops, macs, parameters), (2 * 2 * (8 * 16 + 16 * 4), 2 * (8 * 16 + 16 * 4), 8 * 16 + 16 * 4))

    def test_estimates_are_tesseras(self):
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, estimate_zero3_model_states_mem_needs_all_live
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs, estimate_zero2_model_states_mem_needs_all_live
        model = nn.Linear(1024, 1024, bias=False)
        sizes = tessera.estimate(model, 4, {"bf16": {"enabled": True}})
        self.assertEqual(estimate_zero2_model_states_mem_needs(2**20, 4, 1, cpu_offload=False), (0, sizes[2]["total"]))
        self.assertEqual(estimate_zero3_model_states_mem_needs(2**20, 2**10, 2, 2, False, False), (0, sizes[3]["total"] + 2**11, 2**11))
        host, device, _ = estimate_zero3_model_states_mem_needs(2**20, 0, 2, 2, additional_buffer_factor=1)
        self.assertEqual((host, device), (2 * sizes[3]["total"], 0))
        said = io.StringIO()
        with redirect_stdout(said):
            estimate_zero2_model_states_mem_needs_all_live(model)
            estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=4)
        self.assertEqual(said.getvalue().count("offload_optimizer=none"), 3)

    def test_small_things(self):
        said = io.StringIO()
        with redirect_stdout(said):
            deepspeed.runtime.utils.see_memory_usage("here")
            deepspeed.runtime.utils.see_memory_usage("there", force=True)
        self.assertTrue(said.getvalue().startswith("there\nMA "))
        with self.assertLogs(deepspeed.logger, "INFO") as logs:
            deepspeed.log_dist("hello", ranks=[0])
        self.assertIn("hello", logs.output[0])
        self.assertEqual(deepspeed.utils.instrument_w_nvtx(lambda a: a + 1)(2), 3)
        base = torch.arange(10.0)
        clone = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": [base[:2]]})
        self.assertEqual(clone["a"][0].untyped_storage().nbytes(), 8)
        moved = deepspeed.runtime.utils.move_to_device({"a": (base, 1)}, "cpu")
        self.assertIs(moved["a"][0], base)

    def test_a_command_that_a_rank_starts_says_its_error_to_the_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "error.json")
            with mock.patch.dict(os.environ, TESSERA_ERROR_FILE=str(path)), self.assertRaisesRegex(tessera.CheckpointError, "no checkpoint directory"):
                deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder + "/missing")
            self.assertFalse(path.exists())


class Libraries(RanksTest):
    def test_trust_remote_code(self):
        (self.folder / "remote").mkdir()
        (self.folder / "remote" / "code.py").write_text(REMOTE_CODE)
        (self.folder / "remote" / "config.json").write_text(json.dumps({"model_type": "remote", "auto_map": {"AutoConfig": "code.RemoteConfig"}}))
        (text,) = self.finish([self.start(sys.executable, "-c", EPOCHS, self.folder / "remote", HF_HOME=self.folder / "hf")])
        self.assertIn("RemoteConfig", text)

    def test_accelerate_launch(self):
        """`accelerate launch --use_deepspeed`, with the one line in a sitecustomize.py, since the launcher looks for deepspeed itself."""
        (self.folder / "site").mkdir()
        (self.folder / "site" / "sitecustomize.py").write_text("import tessera.deepspeed\n")
        (self.folder / "script.py").write_text(ACCELERATE)
        path = f"{self.folder / 'site'}:{Path(tessera.__file__).parents[1]}"
        self.finish([self.start(
            sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", 2, "--num_machines", 1, "--zero_stage", 2,
            "--mixed_precision", "no", "--main_process_port", free_port(), "script.py", PYTHONPATH=path, HF_HOME=self.folder / "hf")])
        self.assertEqual([(self.folder / f"steps{rank}").read_text() for rank in range(2)], ["2", "2"])

    def test_a_script_as_it_is(self):
        """By `python -m tessera.deepspeed`; clipping is DeepSpeed's default, unless the configuration names it."""
        (self.folder / "beside.py").write_text("value = 7")
        (self.folder / "script.py").write_text(SCRIPT)
        (self.folder / "ds.json").write_text('{"train_batch_size": 2, "gradient_clipping": 0.5, "optimizer": {"type": "Adam"}}')
        said, = self.finish([self.start(sys.executable, "-m", "tessera.deepspeed", "script.py", "--deepspeed_config", "ds.json")])
        self.assertIn("clipping 1.0 0.5 0.0 argument ds.json beside 7", said)  # with -m: launch_test.py
        for words, expected in (([], "expected SCRIPT.py"), (["none.py"], "none.py: no such file")):
            self.assertRaisesRegex(SystemExit, expected, tessera.deepspeed.__main__.main, words)

    def test_under_the_command(self):
        """`tessera launch` gives rank 0 the socket of the store."""
        self.finish([self.start(TESSERA, "launch", "-n", 2, "--", *python(), PROGRAMS / "deepspeed_names_rank.py", "auto", "torch_group")])


if __name__ == "__main__":
    unittest.main()

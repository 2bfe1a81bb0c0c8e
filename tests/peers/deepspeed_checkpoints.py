"""Checkpoints that DeepSpeed writes, at stages 0 to 3, are read by Tessera: the bits are those that its engine says it has.

    pip install --target FOLDER --no-deps deepspeed hjson ninja py-cpuinfo msgpack einops      # on the CPU: DS_BUILD_OPS=0
    make test-peers DEEPSPEED_CHECKPOINTS=FOLDER
    .deps/venv/bin/python tests/peers/deepspeed_checkpoints.py FOLDER [FOLDER...] [--only REGEX] [--worlds 1,2,3] [--keep FOLDER]

Ranks of programs/deepspeed_writer.py train a small model and save it. Compared are: every parameter and moment with what the engine's own
functions return, the masters with zero_to_fp32.py's, and Tessera's reading of the folder that ds_to_universal.py makes with the same. With
round_robin_gradients the engine's functions, and so ds_to_universal.py, mix up parameters on several ranks: there the module counts. Of
several FOLDERs the first that has a module counts, so that an old release needs only itself. Exit code 1: a difference.
"""
import argparse
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import types
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import suite

os.environ.setdefault("TRAINERS_TOOL", str(suite.BUILD / "trainers_tool"))
sys.path.insert(0, str(suite.ROOT / "tests" / "checkpoint" / "foreign"))
sys.path.insert(0, str(suite.HERE / "programs"))

import torch  # noqa: E402
from trainers_testing import TOOL, Found, bits  # noqa: E402

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
ADAM = {"optimizer": "adamw"}
CASES = {
    "0_fp32": {"stage": 0, "dtype": "fp32", **ADAM},
    "0_fp32_groups": {"stage": 0, "dtype": "fp32", **ADAM, "groups": 2, "frozen": True},
    "0_fp32_untied": {"stage": 0, "dtype": "fp32", "optimizer": "sgd", "tied": False},
    "0_fp16": {"stage": 0, "dtype": "fp16", **ADAM, "groups": 2},
    "0_fp16_fused": {"stage": 0, "dtype": "fp16", **ADAM, "groups": 2, "frozen": True, "fused": True},
    "0_bf16": {"stage": 0, "dtype": "bf16", **ADAM},
    "0_bf16_fused": {"stage": 0, "dtype": "bf16", "optimizer": "config", "fused": True, "old": False},
    "1_fp32": {"stage": 1, "dtype": "fp32", **ADAM, "groups": 2, "frozen": True},
    "1_fp16": {"stage": 1, "dtype": "fp16", "optimizer": "sgd", "loss_scale": 8},
    "1_bf16": {"stage": 1, "dtype": "bf16", **ADAM, "groups": 2},
    "1_bf16_fp32_grads": {"stage": 1, "dtype": "bf16", **ADAM, "config": {"data_types": {"grad_accum_dtype": "fp32"}}, "script": False},
    "1_elastic": {"stage": 1, "dtype": "fp32", **ADAM, "zero": {"elastic_checkpoint": True}, "universal": False},
    "2_fp32": {"stage": 2, "dtype": "fp32", **ADAM, "zero": {"round_robin_gradients": True}, "shuffled": True, "universal": False},
    "2_fp16": {"stage": 2, "dtype": "fp16", **ADAM, "frozen": True},
    "2_bf16": {"stage": 2, "dtype": "bf16", "optimizer": "config", "frozen": True, "groups": 2},
    "2_sgd": {"stage": 2, "dtype": "bf16", "optimizer": "sgd", "groups": 2, "universal": False},
    "2_without_frozen": {"stage": 2, "dtype": "bf16", **ADAM, "frozen": True, "save": {"exclude_frozen_parameters": True}},
    "3_fp32": {"stage": 3, "dtype": "fp32", **ADAM, "frozen": True},
    "3_fp16": {"stage": 3, "dtype": "fp16", "optimizer": "sgd", "groups": 2, "universal": False},
    "3_bf16": {"stage": 3, "dtype": "bf16", **ADAM, "groups": 2, "frozen": True},
    "3_sub_groups": {"stage": 3, "dtype": "bf16", **ADAM, "groups": 2, "zero": {"sub_group_size": 40}},
    "3_without_frozen": {"stage": 3, "dtype": "bf16", **ADAM, "frozen": True, "save": {"exclude_frozen_parameters": True}},
    "3_unsaved_step": {"stage": 3, "dtype": "fp32", **ADAM, "steps": 0, "universal": False},
}


class Wrong(Exception):
    pass


def expect(found, expected, what):
    if found != expected:
        raise Wrong(f"{what}: found {found}; expected {expected}")


def expect_bits(found, expected, what):
    expect((found.dtype, tuple(found.shape)), (expected.dtype, tuple(expected.shape)), what)
    if bits(found) != bits(expected):
        raise Wrong(f"{what}: {(found != expected).sum()} elements of {found.numel()} differ")


def write_checkpoints(folders, to, cases, world):
    """All cases of one number of ranks."""
    to.mkdir(parents=True)
    (to / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(map(str, [*folders, suite.HERE / "programs"]))
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "CUDA_VISIBLE_DEVICES": "",
                   "PYTHONDONTWRITEBYTECODE": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    ranks = []
    for rank in range(world):
        with open(to / f"rank{rank}.log", "w") as log:
            ranks.append(subprocess.Popen([sys.executable, "-B", str(suite.HERE / "programs" / "deepspeed_writer.py"), str(to), str(to / "cases.json")],
                                          env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT))
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise Wrong(f"the ranks' exit codes are {codes}:\n" + (to / "rank0.log").read_text()[-2000:])


def ask(reader, path):
    with tempfile.NamedTemporaryFile() as data:
        answer = json.loads(subprocess.run([TOOL, reader, str(path), data.name], capture_output=True, text=True, check=True).stdout)
        if answer is None or "error" in answer:
            raise Wrong(f"{reader}: {answer}")
        return Found(answer, Path(data.name).read_bytes())


def compare(found, truth, case, world, universal=False):
    what = "universal: " if universal else ""
    excluded = "save" in case
    expected = {name: one for name, one in truth["parameters"].items() if one["trainable"] or not excluded}
    expect(sorted(found.names), sorted(expected), f"{what}names")
    for name, one in expected.items():
        answer = next(each for each in found["parameters"] if each["name"] == name)
        if truth["named"]:
            expect(answer["trainable"], one["trainable"], f"{what}{name}: trainable")
        expect("torch." + {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[answer["dtype"]], one["dtype"], f"{what}{name}: type")
        expect_bits(found.parameters[name], one.get("fp32", one["compute"]), f"{what}{name}")
        states = {key: one[key] for key in STATES if key in one}
        if truth["named"] and one["trainable"] and case.get("steps") != 0 and not states:
            raise Wrong(f"the engine says no state of {name}")
        if case.get("steps") != 0:  # old releases make states before the first step
            expect(sorted(found.states.get(name, {})), sorted(states), f"{what}{name}: states")
        for key, value in states.items():
            expect_bits(found.states[name][key], value, f"{what}{name}: {key}")
        if "exp_avg" in states:
            expect(found.steps.get(name, 0) in (truth["steps"], truth["steps"] + 1), True,  # some of its wrappers make a step at the start
                   f"{what}{name}: steps {found.steps.get(name, 0)}")
        if truth["named"] and case.get("groups") == 2 and one["trainable"]:
            expect(found.groups[name], 0 if one["compute"].dim() > 1 else 1, f"{what}{name}: group")
    expect(found.aliases, {"head.weight": "embed.weight"} if case.get("tied", True) else {}, f"{what}tied names")
    expect(sorted(found.buffers), sorted(truth["buffers"]), f"{what}buffers")
    for name, one in truth["buffers"].items():
        expect_bits(found.buffers[name], one, f"{what}{name}")
    expect((found["global_steps"], found["skipped_steps"], found["global_samples"]), (truth["steps"], truth["skipped"], truth["samples"]), f"{what}counters")
    expect(found["lr_scheduler"], truth["scheduler"], f"{what}lr_scheduler")
    expect(found["client_state"], {"epoch": 3, "note": "größe", "numbers": [1, 2.5, None]}, f"{what}client_state")
    expect(found["world_size"], world, f"{what}world size")
    expect((found["loss_scaler"] or {}).get("cur_scale"), {"fp16": case.get("loss_scale") or 64}.get(case["dtype"]), f"{what}loss scale")
    expect(any("saves without names" in line for line in found["not_read"]), not truth["named"], f"{what}said to be without names")
    unread = [line for line in found["not_read"]
              if not any(word in line for word in ("client_state.rng", "elastic", "saves without names", "have no names either"))]
    expect(unread, [], f"{what}not read")


def compare_with_scripts(folder, found):
    """zero_to_fp32.py's state dict, and the folder of ds_to_universal.py."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    ours = found.entries()
    for name, one in whole.items():
        one = one.contiguous()
        expect_bits(ours[name] if ours[name].dtype == one.dtype else ours[name].to(one.dtype), one, f"zero_to_fp32: {name}")
    missing = [name for name in ours if name not in whole and name not in found.frozen and name not in found.aliases]
    expect(missing, [], "zero_to_fp32 does not have")


def make_universal(folder):
    from deepspeed.checkpoint import ds_to_universal
    tag = (folder / "latest").read_text()
    words = types.SimpleNamespace(input_folder=str(folder / tag), output_folder=str(folder / f"{tag}_universal"), num_extract_workers=1,
                                  num_merge_workers=1, keep_temp_folder=False, strict=False, inject_missing_state=True)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ds_to_universal.main(words)


def check(folder, case, world):
    if (folder / "failed.txt").exists():
        text = (folder / "failed.txt").read_text().strip().splitlines()
        return "not written", text[-1][:300]
    truth = torch.load(folder / "truth.pt", weights_only=False)
    found = ask("deepspeed", folder)
    compare(found, truth, case, world)
    note = ""
    if case.get("script", case["stage"] > 0):
        try:
            compare_with_scripts(folder, found)
        except ValueError as error:  # that of 0.9 does not know stage 1
            note = f"without zero_to_fp32.py, which failed: {error}"
    if case["stage"] > 0 and case.get("universal", True) and case["optimizer"] != "sgd":
        try:
            make_universal(folder)
        except Exception as error:
            return "passed", f"{note} without ds_to_universal.py, which failed: {type(error).__name__}: {error}"[:300]
        compare(ask("universal", folder), truth, case, world, universal=True)
    return "passed", note


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="what pip install --target made")
    parser.add_argument("--only", default="", help="regular expression of cases")
    parser.add_argument("--worlds", default="1,2,3")
    parser.add_argument("--keep", type=Path, help="keeps the checkpoints in this new folder")
    given = parser.parse_args()
    folders = [one.resolve() for one in given.folders]
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    sys.path[:0] = map(str, folders)
    import old_deepspeed
    old_deepspeed.prepare()
    counts, failed = {}, 0
    with tempfile.TemporaryDirectory(prefix="tessera_peers_") as name:
        base = given.keep or Path(name)
        for world in map(int, given.worlds.split(",")):
            cases = {key: case for key, case in CASES.items() if re.search(given.only, key)}
            write_checkpoints(folders, base / f"world{world}", cases, world)
            version = (base / f"world{world}" / "version.txt").read_text()
            for key, case in cases.items():
                try:
                    outcome, why = check(base / f"world{world}" / key, case, world)
                except Wrong as error:
                    outcome, why, failed = "failed", str(error), failed + 1
                counts[outcome] = counts.get(outcome, 0) + 1
                print(f"DeepSpeed {version}, {world} ranks, {key}: {outcome}{': ' if why else ''}{why}", flush=True)
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

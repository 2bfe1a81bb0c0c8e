"""A DeepSpeed checkpoint of 8 ranks, consolidated and converted: `tessera` beside zero_to_fp32.py and ds_to_universal.py. `make bench-consolidate`.

    .deps/venv/bin/python -B benchmarks/peers/consolidate.py [--stage 3] [--width 1600] [--folder DIR] [--json FILE]

DeepSpeed trains a GPT-2 of 48 layers and a small width for a step, on 8 ranks, and saves. Its tensors are then replaced by random ones of
the width that is asked for (1600: GPT-2 XL, 1.56 billion parameters, 19 to 22 GB of files, 65 GB of disk in all); names, param groups and
classes stay DeepSpeed's.
Each program reads the files from the disk: the page cache is emptied before it, where this runs as root. Memory is the peak of
Pss_Anon + Pss_Shmem of all of its processes, sampled every 20 ms, with that of mapped files (Pss_File) beside it. What ours and theirs write is
compared, element by element.
"""
import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
WORLD, LAYERS, SMALL = 8, 48, 8
ALIGNMENT = 2 * WORLD  # of stage 2's flat vector: nccl_start_alignment_factor x ranks
PYTHON = {**os.environ, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

TRAIN = """
import sys

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

stage, folder, width, layers = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=2, vocab_size=64, n_positions=16))
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "zero_force_ds_cpu_optimizer": False,
          "zero_allow_untested_optimizer": True, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
tokens = torch.randint(64, (1, 16))
engine.backward(engine(tokens, labels=tokens).loss)
engine.step()
engine.save_checkpoint(folder)
"""


def shapes_of(width):
    """{name: shape} of a GPT-2 of this width, with the vocabulary and the positions of OpenAI's."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_embd=width, n_head=2, vocab_size=50257 if width > 100 else 64, n_positions=1024))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def flat(numel, seed):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def replace_states(path, numel, rank, slices=None):
    """Of a rank's file: master and moments; of stage 2 also where the parameters lie in them."""
    file = torch.load(path, map_location="cpu", weights_only=False)
    states = file["optimizer_state_dict"]
    key = "fp32_flat_groups" if "fp32_flat_groups" in states else "single_partition_of_fp32_groups"
    inner = states["optimizer_state_dict" if "optimizer_state_dict" in states else "base_optimizer_state"]["state"][0]
    states[key] = [flat(numel, 3 * rank)]
    inner["exp_avg"], inner["exp_avg_sq"] = flat(numel, 3 * rank + 1), flat(numel, 3 * rank + 2).square()
    if slices is not None:
        (old,) = states["param_slice_mappings"]
        make = type(next(iter(old.values())))
        states["param_slice_mappings"] = [OrderedDict((name, make(numel=end - begin, start=begin)) for name, (begin, end) in slices.items())]
    torch.save(file, path)


def enlarge(folder, stage, width):
    shapes = shapes_of(width)
    (step,) = folder.glob("global_step*")
    for path in sorted(step.glob("*model_states.pt")):
        file = torch.load(path, map_location="cpu", weights_only=False)
        (order,) = file["param_shapes"]
        assert set(order) == set(shapes), "the names of another model"
        order = {name: shapes[name] for name in order}
        file["param_shapes"] = [OrderedDict(order)]
        if stage < 3:
            for name, value in file["module"].items():
                file["module"][name] = flat(1, 7).to(torch.bfloat16).expand(shapes.get(name, value.shape)).contiguous() if name in shapes else value
            file["module"]["lm_head.weight"] = file["module"]["transformer.wte.weight"]
        torch.save(file, path)
    numels = {name: shape.numel() for name, shape in order.items()}
    if stage == 3:
        part = sum(-(-numel // WORLD) for numel in numels.values())
        places = [None] * WORLD
    else:
        total = sum(numels.values())
        part = -(-total // ALIGNMENT) * ALIGNMENT // WORLD
        places, begin = [{} for _ in range(WORLD)], 0
        for name, numel in numels.items():
            for rank in range(begin // part, (begin + numel - 1) // part + 1):
                places[rank][name] = (max(begin, rank * part) - rank * part, min(begin + numel, (rank + 1) * part) - rank * part)
            begin += numel
    for path in step.glob("*optim_states.pt"):
        rank = int(path.name.split("pp_rank_")[1].split("_")[0])
        replace_states(path, part, rank, places[rank])
    return sum(numels.values())


def write(folder, stage, width):
    with tempfile.TemporaryDirectory() as scripts:
        script = Path(scripts) / "train.py"
        script.write_text(TRAIN)
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), script, str(stage), folder,
                               str(SMALL), str(LAYERS)], env=PYTHON, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-3000:])
    return enlarge(folder, stage, width)


def children_of(pid):
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            pass
    return found


def memory_of(pid):
    """(own, of mapped files) in MB, of a process and all that it has started."""
    own = mapped = 0
    for one in children_of(pid):
        try:
            values = dict(line.split(":") for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()[1:])
        except (OSError, ValueError):
            continue
        own += int(values["Pss_Anon"].split()[0]) + int(values["Pss_Shmem"].split()[0])
        mapped += int(values["Pss_File"].split()[0])
    return own / 1000, mapped / 1000


def run(name, command, out):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.sync()
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    begin, own, mapped = time.monotonic(), 0, 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(list(map(str, command)), env=PYTHON, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            now = memory_of(process.pid)
            own, mapped = max(own, now[0]), max(mapped, now[1])
            time.sleep(0.02)
        seconds = time.monotonic() - begin
        if process.returncode != 0:
            output.seek(0)
            raise RuntimeError(f"{name}: exit code {process.returncode}\n{output.read()[-3000:]}")
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    row = {"program": name, "s": round(seconds, 1), "own_mb": round(own), "mapped_mb": round(mapped), "written_gb": round(written / 1e9, 2)}
    print(f"{name:28} {row['s']:8.1f} s {row['own_mb']:8,} MB own {row['mapped_mb']:8,} MB mapped {row['written_gb']:6.2f} GB written", flush=True)
    return row


def same_weights(theirs, ours):
    """Number of tensors that are equal to the bit; raises where one is not."""
    from safetensors import safe_open

    with safe_open(ours, "pt") as file:
        names, compared = set(file.keys()), 0
        for path in sorted(theirs.glob("pytorch_model*.bin")):
            for name, value in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
                if not torch.equal(file.get_tensor(name), value):
                    raise RuntimeError(f"{name} differs")
                compared += 1
    if compared != len(names):
        raise RuntimeError(f"{compared} of {len(names)} tensors are in {theirs}")
    return compared


def same_universal(theirs, ours):
    count = 0
    for path in sorted(theirs.rglob("*.pt")):
        if path.parent.parent.name != "zero" or path.name == "step.pt":
            continue
        here = [one for one in ours.rglob(path.name) if one.parent.name == path.parent.name]
        a, b = (torch.load(one, map_location="cpu", weights_only=False) for one in (path, here[0]))
        if not torch.equal(*(one["param"] if isinstance(one, dict) else one for one in (a, b))):
            raise RuntimeError(f"{path.parent.name}/{path.name} differs")
        count += 1
    if count == 0:
        raise RuntimeError(f"{theirs} has nothing to compare")
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, nargs="*", default=[3, 2])
    parser.add_argument("--width", type=int, default=1600, help="of the model; 1600: GPT-2 XL")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to be measured (default: the one for temporary files)")
    parser.add_argument("--json", help="file for the numbers")
    given = parser.parse_args()
    tessera = os.environ.get("TESSERA", ROOT / "build" / "tessera")
    if importlib.util.find_spec("deepspeed") is None:
        print(f"error: deepspeed is not installed in {sys.prefix}; expected it: {sys.executable} -m pip install deepspeed")
        return 2
    rows = []
    with tempfile.TemporaryDirectory(prefix="tessera_consolidate_", dir=given.folder) as folder:
        folder = Path(folder)
        # A parameter has at most 14 bytes in the source, and 12 each in the slices and in the outcome of ds_to_universal.
        needed, free = 40 * sum(shape.numel() for shape in shapes_of(given.width).values()), shutil.disk_usage(folder).free
        if needed > free:
            print(f"error: {folder.parent}: found {free / 1e9:.0f} GB free; expected {needed / 1e9:.0f} for --width {given.width}: another --folder")
            return 2
        for stage in given.stage:
            source = folder / "source"
            numel = write(source, stage, given.width)
            size = sum(path.stat().st_size for path in source.rglob("*.pt"))
            print(f"ZeRO-{stage}, {WORLD} ranks, {numel / 1e9:.2f} billion parameters, {size / 1e9:.1f} GB", flush=True)
            theirs, ours = folder / "theirs", folder / "ours"
            (step,) = source.glob("global_step*")
            of_stage = [run("cat > /dev/null", ["sh", "-c", f"cat {step}/*.pt > /dev/null"], theirs),
                        run("zero_to_fp32.py", [sys.executable, source / "zero_to_fp32.py", source, theirs], theirs),
                        run("tessera consolidate", [tessera, "consolidate", source, ours / "model.safetensors"], ours)]
            print(f"{same_weights(theirs, ours / 'model.safetensors')} tensors are equal", flush=True)
            shutil.rmtree(theirs)
            shutil.rmtree(ours)
            of_stage.append(run("ds_to_universal.py", [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", step,
                                                       "--output_folder", theirs / "universal",
                                                       *(["--inject_missing_state"] if stage < 3 else [])], theirs))  # of Megatron
            expected = theirs / "universal"
            sample = folder / "sample"  # there is no room for both
            shutil.rmtree(sample, ignore_errors=True)
            for name in ("transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", f"transformer.h.{LAYERS - 1}.ln_2.bias"):
                shutil.copytree(expected / "zero" / name, sample / "zero" / name)
            shutil.rmtree(theirs)
            of_stage.append(run("tessera convert", [tessera, "convert", source, ours / "universal", "--to", "universal"], ours))
            print(f"{same_universal(sample, ours)} files are equal", flush=True)
            rows += [{"stage": stage, "parameters": numel, "source_gb": round(size / 1e9, 2), **row} for row in of_stage]
            shutil.rmtree(ours)
            shutil.rmtree(source)
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

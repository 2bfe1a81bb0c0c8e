"""Memory and time of training with state off the device: FSDP2, DeepSpeed and Tessera, one rank on the CPU, in turns.

    .deps/venv/bin/python benchmarks/python/offload.py [--gpt 110m] [--rounds 1] [--buffers 1] [--only REGEX] [--disk DIR] [--write]

The GPT of the other benchmarks in fp32, AdamW, clipping at norm 1, four micro-steps of 2 x 256 tokens a step. Each turn is a process of its
own: two steps that do not count, then three that do. On the CPU "cpu" offload has nowhere to go to: what it costs is shown, there is
nothing to gain. DeepSpeed's offload needs its own AdamW and, for nvme, its async_io (libaio-dev); it compiles both at first use.

step s   the fastest step, over all rounds
x        to PyTorch's
peak MB  the largest resident set of the process, over what it held before the model was made (libraries); the median of the rounds
x        to PyTorch's
loss     the mean of the last step's micro-steps: all train the same weights on the same tokens

--write replaces the table of docs/offload.md.
"""
import os

os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")  # read on import
import argparse  # noqa: E402
import datetime  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

import forked  # noqa: E402
import torch  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
import document  # noqa: E402
import machine  # noqa: E402
import peer  # noqa: E402
import results  # noqa: E402
import step_peer  # noqa: E402

COMMAND = "make bench-offload-python"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "offload.md"
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MICRO_BATCH, SEQUENCE, MICRO_STEPS, WARM_UP, STEPS, SEED = 2, 256, 4, 2, 3, 1
NVME = {"device": "nvme", "pin_memory": False}
ROWS = {"PyTorch": ("plain", {}),
        "FSDP2": ("fsdp2", {"offload": False}),
        "FSDP2, CPUOffloadPolicy": ("fsdp2", {"offload": True}),
        "DeepSpeed stage 3": ("deepspeed", {}),
        "DeepSpeed stage 2, optimizer cpu": ("deepspeed", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        "DeepSpeed stage 3, all cpu": ("deepspeed", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        "DeepSpeed stage 3, all nvme": ("deepspeed", {"offload_optimizer": {**NVME, "buffer_count": 4},
                                                      "offload_param": {**NVME, "buffer_count": 5, "buffer_size": 13_000_000}}),
        "Tessera stage 3": ("own", {}),
        "Tessera stage 3, optimizer nvme": ("own", {"offload_optimizer": NVME}),
        "Tessera stage 3, all nvme": ("own", {"offload_optimizer": NVME, "offload_param": NVME}),
        "Tessera stage 3, all nvme, cheap": ("own", {"offload_optimizer": NVME, "offload_param": NVME, "policy": "cheap"}),
        "Tessera stage 3, all nvme, block": ("own", {"offload_optimizer": NVME, "offload_param": NVME, "policy": "block"})}


def with_folder(zero, folder):
    return {key: {**value, "nvme_path": folder} if isinstance(value, dict) and value["device"] == "nvme" else value
            for key, value in zero.items()}


def settings(zero):
    return {"train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": MICRO_STEPS, "gradient_clipping": step_peer.CLIPPING,
            "zero_optimization": {"stage": 3, **zero}, "steps_per_print": 10**9}


def torch_training(model):
    return step_peer.Training(model, lambda batch: model(*batch), [peer.fused_adamw(model.parameters(), **ADAMW)], MICRO_STEPS)


def engine_training(engine):
    return step_peer.EngineTraining(engine, lambda batch: engine(*batch), MICRO_STEPS)


def plain(model, *_):
    return torch_training(model)


def fsdp2(model, zero, _):
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
    torch.distributed.init_process_group("gloo")
    policy = CPUOffloadPolicy(pin_memory=False) if zero["offload"] else OffloadPolicy()
    return torch_training(peer.sharded(model, model.blocks, offload_policy=policy))


def deepspeed(model, zero, options):
    library = peer.load_deepspeed()
    config = settings(with_folder(zero, options.disk))
    if "offload_optimizer" in zero:
        config["optimizer"] = {"type": "AdamW", "params": ADAMW}  # its own, which it asks for under offload
        engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    else:
        engine, *_ = library.initialize(model=model, optimizer=peer.fused_adamw(model.parameters(), **ADAMW), config=config)
    return engine_training(engine)


def own(model, zero, options):
    import tessera
    sections = {key: {**value, "buffer_count": options.buffers} for key, value in with_folder(zero, options.disk).items() if key != "policy"}
    config = {**settings(sections), "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
              "activation_checkpointing": {"policy": zero.get("policy", "none")}}
    engine, *_ = tessera.initialize(model=model, config=config)
    return engine_training(engine)


def status(name):
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE).group(1)) / 1e3


def measure(options):
    """This process is one turn of one row: prints its result as JSON."""
    way, zero = ROWS[options.row]
    {"own": lambda: __import__("tessera"), "deepspeed": peer.load_deepspeed}.get(way, lambda: None)()
    torch.set_num_threads(options.threads)
    before = status("VmRSS")
    torch.manual_seed(SEED)
    dim, layers, heads, vocabulary, _ = peer.SHAPES[options.gpt]
    model = peer.Gpt(dim, layers, heads, vocabulary, SEQUENCE)
    training = {"plain": plain, "fsdp2": fsdp2, "deepspeed": deepspeed, "own": own}[way](model, zero, options)
    generator = torch.Generator().manual_seed(SEED)
    tokens = [torch.randint(vocabulary, (MICRO_BATCH, SEQUENCE + 1), generator=generator) for _ in range((WARM_UP + STEPS) * MICRO_STEPS)]
    steps = step_peer.Steps(training, iter([(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]), step_peer.Device("cpu"))
    times = steps.run(WARM_UP + STEPS)["step_ms"]
    print("\n" + json.dumps({"seconds": min(times[WARM_UP:]) / 1e3, "peak": status("VmHWM") - before, "loss": steps.losses[-1]}), flush=True)
    os._exit(0)  # after DeepSpeed's stage 3 a destructor sometimes aborts


def turn(row, options):
    """The row's result, or None; what the process said goes to stderr then."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(forked.free_port())}
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        done = subprocess.run([sys.executable, "-B", __file__, "--row", row, "--gpt", options.gpt, "--threads", str(options.threads),
                               "--buffers", str(options.buffers), "--disk", folder], env={**os.environ, **place}, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(f"{row}: failed\n{done.stdout[-2000:]}{done.stderr[-4000:]}", file=sys.stderr)
    return None


def markdown(found, options):
    best = {row: min(turn["seconds"] for turn in turns) for row, turns in found.items() if turns}
    peak = {row: statistics.median(turn["peak"] for turn in turns) for row, turns in found.items() if turns}
    base = next(iter(best))
    lines = [f"GPT {options.gpt}, fp32, AdamW; {MICRO_STEPS} micro-steps of {MICRO_BATCH} x {SEQUENCE} tokens, {options.threads} threads; "
             f"rounds: {options.rounds}.", "", f"| | step, s | x {base} | peak, MB | x {base} | loss |", "|---" * 6 + "|"]
    for row, turns in found.items():
        if turns:
            lines.append(f"| {row} | {best[row]:.2f} | {best[row] / best[base]:.2f} | {peak[row]:,.0f} | {peak[row] / peak[base]:.2f} | "
                         f"{turns[-1]['loss']:.6f} |")
        else:
            lines.append(f"| {row} | fails | | | | |")
    return "\n".join(lines) + "\n"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", choices=("33m", "110m"), default="110m")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--buffers", type=int, default=1, help="buffer_count of Tessera's rows")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name matches")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder for what nvme offloads")
    parser.add_argument("--write", action="store_true", help="puts the table into docs/offload.md")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write and (options.only or options.buffers != 1):
        parser.error("--write: found --only or --buffers; expected all rows in a document, with one buffer")
    return options


def main():
    options = parse_arguments()
    if options.row:
        measure(options)
    if options.write:
        document.surroundings(DOCUMENT, COMMAND)  # before minutes of runs
    found = {row: [] for row in ROWS if re.search(options.only, row)}
    for number in range(options.rounds):
        for row, turns in found.items():
            print(f"round {number + 1}: {row}", file=sys.stderr, flush=True)
            turns += [result] if (result := turn(row, options)) else []
    table = markdown(found, options)
    print(table)
    if options.write:
        about = {"machine": machine.describe(), "date": datetime.date.today().isoformat(),
                 "versions": machine.versions(("torch", "deepspeed"))}
        document.replace_table(DOCUMENT, COMMAND, results.surroundings(about) + "\n\n" + table)


if __name__ == "__main__":
    main()

"""State off the device: FSDP2, DeepSpeed and Tessera, one rank on the CPU.

The GPT of the other benchmarks in fp32, AdamW, clipping at norm 1, four micro-steps of 2 x 256 tokens a step: in each turn two steps that do
not count, then three that do. On the CPU "cpu" offload has nowhere to go to: what it costs is shown, there is nothing to gain. DeepSpeed's
offload needs its own AdamW and, for nvme, its async_io (libaio-dev); it compiles both at first use.

step s   the fastest step, over all rounds
x        to PyTorch's
peak MB  the largest resident set of the process, over what it held before the model was made (libraries); the median of the rounds
x        to PyTorch's
loss     the mean of the last step's micro-steps: all train the same weights on the same tokens
"""
import statistics
import sys
import tempfile
from pathlib import Path

import forked
import tessera
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
import peer  # noqa: E402
import step_peer  # noqa: E402

DOCUMENT, COMMAND = "offload.md", "make bench-offload-python"
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MICRO_BATCH, SEQUENCE, MICRO_STEPS, WARM_UP, STEPS, SEED = 2, 256, 4, 2, 3, 1
COLUMNS = [("step, s", "seconds", ".2f"), ("x PyTorch", "x_seconds", ".2f"), ("peak, MB", "peak", ",.0f"), ("x PyTorch", "x_peak", ".2f"), ("loss", "loss", ".6f")]
NVME = {"device": "nvme", "pin_memory": False}


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


def fsdp2(model, zero, *_):
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
    torch.distributed.init_process_group("gloo")
    policy = CPUOffloadPolicy(pin_memory=False) if zero["offload"] else OffloadPolicy()
    return torch_training(peer.sharded(model, model.blocks, offload_policy=policy))


def deepspeed(model, zero, folder, _):
    library = peer.load_deepspeed()
    config = settings(with_folder(zero, folder))
    if "offload_optimizer" in zero:
        config["optimizer"] = {"type": "AdamW", "params": ADAMW}  # its own, which it asks for under offload
        engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    else:
        engine, *_ = library.initialize(model=model, optimizer=peer.fused_adamw(model.parameters(), **ADAMW), config=config)
    return engine_training(engine)


def own(model, zero, folder, buffers):
    sections = {key: {**value, "buffer_count": buffers} for key, value in with_folder(zero, folder).items() if key != "policy"}
    config = {**settings(sections), "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
              "activation_checkpointing": {"policy": zero.get("policy", "none")}}
    engine, *_ = tessera.initialize(model=model, config=config)
    return engine_training(engine)


def add_arguments(parser):
    parser.add_argument("--gpt", choices=("33m", "110m"), default="110m")
    parser.add_argument("--buffers", type=int, default=1, help="buffer_count of Tessera's rows")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder for what nvme offloads")


def is_special(args):
    return args.buffers != 1


def rows(_, with_deepspeed):
    """{name: (way, its offload)}."""
    found = {"PyTorch": (plain, {}), "FSDP2": (fsdp2, {"offload": False}), "FSDP2, CPUOffloadPolicy": (fsdp2, {"offload": True})}
    if with_deepspeed:
        cpu = {"device": "cpu"}
        found.update({"DeepSpeed stage 3": (deepspeed, {}),
                      "DeepSpeed stage 2, optimizer cpu": (deepspeed, {"stage": 2, "offload_optimizer": cpu}),
                      "DeepSpeed stage 3, all cpu": (deepspeed, {"offload_optimizer": cpu, "offload_param": cpu}),
                      "DeepSpeed stage 3, all nvme": (deepspeed, {"offload_optimizer": {**NVME, "buffer_count": 4},
                                                                  "offload_param": {**NVME, "buffer_count": 5, "buffer_size": 13_000_000}})})
    everything = {"offload_optimizer": NVME, "offload_param": NVME}
    found.update({"Tessera stage 3": (own, {}), "Tessera stage 3, optimizer nvme": (own, {"offload_optimizer": NVME}),
                  "Tessera stage 3, all nvme": (own, everything),
                  **{f"Tessera stage 3, all nvme, {policy}": (own, {**everything, "policy": policy}) for policy in ("cheap", "block")}})
    return found


def measure(args, way, zero):
    """One row in one round."""
    def body(_):
        idle = step_peer.Idle()
        torch.manual_seed(SEED)
        dim, layers, heads, vocabulary, _ = peer.SHAPES[args.gpt]
        training = way(peer.Gpt(dim, layers, heads, vocabulary, SEQUENCE), zero, folder, args.buffers)
        generator = torch.Generator().manual_seed(SEED)
        tokens = [torch.randint(vocabulary, (MICRO_BATCH, SEQUENCE + 1), generator=generator) for _ in range((WARM_UP + STEPS) * MICRO_STEPS)]
        steps = step_peer.Steps(training, iter([(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]), step_peer.Device("cpu"))
        times = steps.run(WARM_UP + STEPS)["step_ms"]
        return {"seconds": min(times[WARM_UP:]) / 1e3, "peak": (step_peer.peak_resident_mib() - idle.resident) * 2**20 / 1e6, "loss": steps.losses[-1]}

    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        return forked.run(1, body, timeout_s=1800)[0]


def tables(args, measured):
    """(title, what it is of, rows)"""
    best = {row: {"seconds": min(turn["seconds"] for turn in rounds), "peak": statistics.median(turn["peak"] for turn in rounds), "loss": rounds[-1]["loss"]}
            for row, rounds in measured.items()}
    base = best.get("PyTorch")
    yield ("", f"GPT {args.gpt}, fp32, AdamW; {MICRO_STEPS} micro-steps of {MICRO_BATCH} x {SEQUENCE} tokens, {torch.get_num_threads()} threads; "
               f"rounds: {args.rounds}.",
           {row: {**found, **{f"x_{key}": found[key] / base[key] if base else None for key in ("seconds", "peak")}} for row, found in best.items()})

"""The rows of the table: what each is called, what it needs and how its users start it.

TESSERA may name another command than the build's.
"""
import os
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Row:
    """`command`: words, where {recipe} and {weights} stand for files."""
    name: str
    title: str
    processes: int
    command: tuple
    needs: tuple = ()  # Python packages that not every machine has
    is_ours: bool = False


def torchrun(*words):
    """torchrun of this Python; --standalone chooses a free port."""
    return (str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2", *words)


def tessera(name, title, processes, *settings, start=()):
    words = [os.environ.get("TESSERA", str(ROOT / "build" / "tessera")), "train", "{recipe}", "--init", "{weights}"]
    for setting in settings:
        words += ["--set", setting]
    if processes > 1 and not start:
        words += ["--nproc", str(processes)]
    return Row(name, title, processes, (*start, *words), is_ours=True)


def python(name, title, processes, way, *needs, start=(sys.executable,)):
    return Row(name, title, processes, (*start, str(HERE / "ways.py"), way, "{recipe}", "{weights}"), ("transformers", *needs))


STAGE_2 = "zero_optimization.stage=2"
ROWS = [
    tessera("tessera", "Tessera, one process", 1, "zero_optimization.stage=0"),
    *(tessera(f"tessera-stage{stage}", f"Tessera stage {stage}, --nproc 2", 2, f"zero_optimization.stage={stage}") for stage in range(4)),
    tessera("tessera-autocast", "Tessera stage 2, bf16 autocast", 2, STAGE_2, "torch_autocast.enabled=true"),
    tessera("tessera-bf16", "Tessera stage 2, bf16", 2, STAGE_2, "bf16.enabled=true"),
    tessera("tessera-torchrun", "Tessera stage 2, torchrun", 2, STAGE_2, start=torchrun("--no-python")),
    python("single", "PyTorch, one process", 1, "single"),
    python("data-parallel", "nn.DataParallel (no GPU: a module)", 1, "data_parallel"),
    python("ddp", "DDP, torchrun", 2, "ddp", start=torchrun()),
    python("ddp-spawn", "DDP, torch.multiprocessing.spawn", 2, "ddp_spawn"),
    python("ddp-amp", "DDP and AMP (bf16), torchrun", 2, "ddp_amp", start=torchrun()),
    python("accelerate", "Accelerate, torchrun", 2, "accelerate", "accelerate", start=torchrun()),
    python("deepspeed", "DeepSpeed stage 2, torchrun", 2, "deepspeed", "deepspeed", start=torchrun()),
    python("hf-trainer", "Hugging Face's Trainer, torchrun", 2, "hf_trainer", "accelerate", start=torchrun()),
]

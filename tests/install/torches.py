"""Each torch of requirements.txt: its build, its wheel in a fresh virtual environment, and what that trains. `make test-torches` runs it.

    .deps/venv/bin/python -B tests/install/torches.py [2.12 2.15.0 ...] [--module | --sdist --suite] [--json FILE]

For each torch `make wheel TESSERA_TORCH=...` runs, pip installs the wheel, and a GPT of two layers trains on two ranks at stages 0 to 3. The
losses of all stages must be the same bits, and equal those of the first torch in the table to rounding. With --module only
the Python module is built, and trains where it was built: that takes half of the time. With --sdist pip
builds the sdist with it, too, and with --suite `make test` runs. Prints a table; the exit code is 1 when something failed. torch itself
is not installed again: the environments find the one of .deps/venv*.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_DIFFERENCE = {"fp32": 1e-4, "bf16": 2e-2}  # relative: kernels of another torch round otherwise

TRAIN = """
import json
import sys

import tessera
import torch
from torch import nn
from torch.nn import functional


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_mask=nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]), is_causal=True)
        return self.head(x)


tessera.comm.init_distributed()
rank, losses = tessera.comm.get_rank(), {}
for stage in range(4):
    torch.manual_seed(0)
    engine, *_ = tessera.initialize(model=Gpt(), config={"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": sys.argv[1] == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}})
    data = torch.randint(64, (12, 8, 17), generator=torch.Generator().manual_seed(1))
    losses[stage] = []
    for batch in data:
        mine = batch[4 * rank:4 * rank + 4]
        loss = functional.cross_entropy(engine(mine[:, :-1]).flatten(0, 1).float(), mine[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses[stage].append(tessera.comm.all_reduce(loss.item()) / 2)
    engine.destroy()
if rank == 0:
    print("RESULT " + json.dumps({"torch": torch.__version__, "losses": list(losses.values())}))
"""


class Failed(Exception):
    """What a command said, when it failed."""


def run(*command, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS", "TESSERA_TORCH", "TESSERA_BUILD_DIR", "TESSERA", "PLATFORM")}
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False, env={**kept, **environment})
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def of_scripts(name, torch=""):
    """A variable of scripts/common.sh, which knows the versions and their folders."""
    return run("bash", "-c", f"source scripts/common.sh; echo ${name}", TESSERA_TORCH=torch).strip()


def torches(wanted):
    return [of_scripts("TORCH", torch) for torch in wanted] or of_scripts("TORCHES").split()


def environment_of(torch, folder):
    """The Python of a new virtual environment, which finds the packages of the one with this torch."""
    built_in = Path(of_scripts("VENV", torch))
    (site,) = built_in.glob("lib/python3*/site-packages")
    run(built_in / "bin" / "python", "-m", "venv", folder)
    (own,) = folder.glob("lib/python3*/site-packages")
    (own / "torch.pth").write_text(f"{site}\n")
    return folder / "bin" / "python"


def install(python, package):
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", package, PIP_DISABLE_PIP_VERSION_CHECK="1")


def trained(torch, folder, *launch, **environment):
    """{precision: losses of stage 0, which are those of all stages}. `launch`: a command that starts two ranks of a script."""
    losses = {}
    (folder / "train.py").write_text(TRAIN)
    for precision in MOST_DIFFERENCE:
        said = run(*launch, folder / "train.py", precision, OMP_NUM_THREADS="1", **environment)
        result = json.loads(re.search(r"RESULT (.*)", said)[1])
        if result["torch"].split("+")[0] != torch:
            raise Failed(f"the environment has torch {result['torch']}")
        if any(of_stage != result["losses"][0] for of_stage in result["losses"]):
            raise Failed(f"{precision}: the losses of the stages differ: {result['losses']}")
        losses[precision] = result["losses"][0]
    return losses


def by_wheel(python):
    return python, "-m", "tessera", "launch", "-n", 2, "--", python


def check_module(torch):
    start = time.monotonic()
    run("scripts/setup.sh", "--python", TESSERA_TORCH=torch)
    run("scripts/build.sh", "release", "tessera_engine_module", TESSERA_TORCH=torch)
    row = {"torch": torch, "built_s": round(time.monotonic() - start)}
    built = ROOT / ("build" + of_scripts("TESSERA_BUILD_SUFFIX", torch))
    python = Path(of_scripts("VENV", torch)) / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="tessera_torch_") as folder:
        row["losses"] = trained(torch, Path(folder), python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2,
                                PYTHONPATH=str(built / "python"))
    return row


def check(torch, suite, sdist):
    run("scripts/setup.sh", "--python", TESSERA_TORCH=torch)  # what trains imports torch; making the wheel does not
    start = time.monotonic()
    wheel = re.search(r"^(dist/tessera-\S+\.whl): ", run("make", "wheel", TESSERA_TORCH=torch), re.MULTILINE)[1]
    row = {"torch": torch, "built_s": round(time.monotonic() - start)}
    with tempfile.TemporaryDirectory(prefix="tessera_torch_") as folder:
        folder = Path(folder)
        python = environment_of(torch, folder / "venv")
        install(python, wheel)
        row["losses"] = trained(torch, folder, *by_wheel(python))
        if sdist:
            start = time.monotonic()
            python = environment_of(torch, folder / "of_sdist")
            run(python, "-c", "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])", folder)
            (path,) = folder.glob("tessera-*.tar.gz")
            install(python, path)
            row["sdist_s"] = round(time.monotonic() - start)
            if trained(torch, folder, *by_wheel(python)) != row["losses"]:
                raise Failed("what was built from the sdist has other losses")
    if suite:
        start = time.monotonic()
        said = run("make", "test", TESSERA_TORCH=torch)
        row["suite"] = f"{re.search(r'[0-9]+% tests passed.*', said)[0]}, {round(time.monotonic() - start)} s"
    return row


def difference(losses, base):
    return max(abs(a - b) / abs(b) for a, b in zip(losses, base, strict=True))


def main():
    parser = argparse.ArgumentParser(description="Builds and tries each torch")
    parser.add_argument("torches", nargs="*", metavar="TORCH")
    parser.add_argument("--module", action="store_true", help="build the Python module alone, and no wheel")
    parser.add_argument("--suite", action="store_true", help="run the whole suite with each, too")
    parser.add_argument("--sdist", action="store_true", help="build the sdist with each by pip, too: some minutes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.module and (args.suite or args.sdist):
        parser.error("--module builds neither a wheel nor an sdist; expected it without --sdist and --suite")
    rows, failed = [], False
    try:
        chosen = torches(args.torches)
    except Failed as error:
        sys.exit(str(error).splitlines()[-1])
    print("| torch | built in s | fp32 losses, largest relative difference | bf16 | sdist built in s | suite |\n|---|---|---|---|---|---|")
    for torch in chosen:
        try:
            row = check_module(torch) if args.module else check(torch, args.suite, args.sdist)
        except Failed as error:
            failed = True
            print(f"| {torch} | failed | | | | |\n{error}", flush=True)
            continue
        rows.append(row)
        differences = {precision: difference(row["losses"][precision], rows[0]["losses"][precision]) for precision in MOST_DIFFERENCE}
        failed = failed or any(differences[precision] > most for precision, most in MOST_DIFFERENCE.items())
        print(f"| {torch} | {row['built_s']} | {differences['fp32']:.1e} | {differences['bf16']:.1e} | "
              f"{row.get('sdist_s', 'not run')} | {row.get('suite', 'not run')} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

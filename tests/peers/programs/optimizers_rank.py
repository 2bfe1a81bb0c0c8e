"""Optimizers of packages, one row each: `optimizers_rank.py BACKEND STAGES ROWS.json` prints a JSON line a row and stage on rank 0.

Each trains a model with two param groups, a frozen and a tied parameter, three micro-batches a step and clipping. Beside each update the
same class in one process gets the same gradients; all parameters have to have the same bits, and where Tessera has a formula of the class,
as of RMSprop, they are within 1e-6.
"""
import gc
import importlib
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "programs"))

import tessera  # noqa: E402
import torch  # noqa: E402
import whole_optimizer_rank as rank_program  # noqa: E402


def made(row, model):
    kind = getattr(importlib.import_module(row["module"]), row["class"])
    parameters = rank_program.trained(model)
    chosen = [p for p in parameters if p.ndim == 2] if row.get("matrices") else parameters
    groups = chosen if row.get("one_group") or row.get("matrices") else rank_program.two_groups(model)
    torch.manual_seed(0)  # for those that draw when they are made
    return kind(groups, **row.get("options", {}))


def outcome(row, stage):
    torch.manual_seed(1)
    try:
        engine, _, _ = rank_program.same_bits(
            stage, lambda model: made(row, model), steps=4, accumulation=3, clipping=row.get("clipping", 0.01), limit_on_shards=1e-6,
            agreed=lambda problem: next((text for text in tessera.comm.all_gather(problem, "verdict") if text), ""))
    except Exception as error:  # of any optimizer
        return f"{type(error).__name__}: {error}".splitlines()[0][:220]
    whole = engine._whole_optimizer
    if whole is None:
        return "within 1e-6, on shards"
    return f"same bits, on rank 0: {whole.why}" if whole.on_one_rank and tessera.comm.get_world_size() > 1 else "same bits"


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tessera.comm.init_distributed(backend=sys.argv[1], timeout_s=120, rendezvous_timeout_s=120)
    for row in json.loads(Path(sys.argv[3]).read_text()):
        for stage in map(int, sys.argv[2].split(",")):
            said = tessera.comm.all_gather(outcome(row, stage), "row")
            if tessera.comm.get_rank() == 0:
                different = next((text for text in said if not text.startswith(("same bits", "within"))), said[0])
                print(json.dumps({"row": row["name"], "stage": stage, "outcome": different}), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()

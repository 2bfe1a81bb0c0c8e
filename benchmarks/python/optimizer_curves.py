"""Losses of a GPT under several optimizers, beside fp32 AdamW: `make bench-curves`.

    build/tessera launch -n 2 -- .deps/venv/bin/python -B benchmarks/python/optimizer_curves.py [--steps 500] [--only AdamW8bit,…] [--json FILE]

The data is a Markov chain, drawn anew for each step, so that nothing can be learned by heart; its entropy, which no model goes below, is
printed. All have the same weights at the start and the same batches. Rows with bitsandbytes' name need the package; its class runs as it is.
"""
import argparse
import json
import time
from pathlib import Path

import tessera
import torch
from torch import nn
from torch.nn import functional

VOCABULARY, LENGTH, BATCH, WIDTH, LAYERS = 512, 64, 8, 256, 4
WINDOW = 50  # steps whose losses one figure is the mean of
KINDS = {"AdamW": {"lr": 1e-3}, "AdamW8bit": {"lr": 1e-3}, "bitsandbytes.AdamW8bit": {"lr": 1e-3}, "Adafactor": {"lr": 1e-2}, "Muon": {"lr": 2e-2, "adam_lr": 1e-3}}


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
                                    for _ in range(LAYERS))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.lm_head(hidden)


CHAIN = torch.softmax(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2.5, -1)


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    for _ in range(LENGTH):
        tokens = torch.cat([tokens, torch.multinomial(CHAIN[tokens[:, -1]], 1, generator=generator)], 1)
    return tokens


def engine_of(kind, options):
    torch.manual_seed(0)
    model, options = GPT(), {**options, "weight_decay": 0.01}
    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    if kind.startswith("bitsandbytes"):
        import bitsandbytes

        given = {"optimizer": bitsandbytes.optim.AdamW8bit(model.parameters(), **options)}
    else:
        given = {}
        config["optimizer"] = {"type": kind, "params": options}
    return tessera.initialize(model=model, config=config, **given)[0]


def curve(kind, options, steps):
    engine = engine_of(kind, options)
    losses, seconds = [], 0.0
    for step in range(steps):
        tokens = batch(step, tessera.comm.get_rank())
        loss = functional.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        begin = time.perf_counter()
        engine.step()
        seconds += time.perf_counter() - begin
        losses.append(tessera.comm.all_reduce(loss.item()))  # the mean
    windows = [sum(losses[at:at + WINDOW]) / WINDOW for at in range(0, steps - WINDOW + 1, WINDOW)]
    numel = sum(p.numel() for p in engine.state_dict().values())
    states = sum(tessera.comm.all_gather(engine.measured_bytes()["optimizer"]))
    formula = sum(tessera.comm.all_gather(engine.formula_bytes()["optimizer"]))
    engine.destroy()
    return {"windows": windows, "update_ms": 1000 * seconds / steps, "bytes_an_element": states / numel, "formula": formula / numel}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tessera.comm.init_distributed()
    found = {kind: curve(kind, KINDS[kind], given.steps) for kind in given.only.split(",")}
    if tessera.comm.get_rank() > 0:
        return
    stationary = torch.linalg.matrix_power(CHAIN.double(), 64)[0]
    entropy = -(stationary[:, None] * CHAIN * CHAIN.log()).sum().item()
    print(f"entropy of the data: {entropy:.4f}; means of {WINDOW} losses")
    print("| optimizer | " + " | ".join(f"{at}" for at in range(WINDOW, given.steps + 1, WINDOW)) + " | bytes an element (formula) | update, ms |")
    print("|---" * (given.steps // WINDOW + 3) + "|")
    for kind, one in found.items():
        print(f"| {kind} | " + " | ".join(f"{value:.4f}" for value in one["windows"])
              + f" | {one['bytes_an_element']:.3f} ({one['formula']:.3f}) | {one['update_ms']:.1f} |")
    if given.json:
        given.json.write_text(json.dumps({"entropy": entropy, "steps": given.steps, "curves": found}, indent=1))


main()

"""A run of DeepSpeed's goes on with Tessera: DeepSpeed trains at ZeRO-2 in bf16, saves, and goes on; Tessera reads its checkpoint at ZeRO-3, with
moments, rates and counts, and does the same further steps. Both are in one program here, to compare the losses; a script of your own needs the
second half. The data are scikit-learn's digits.

    pip install deepspeed==0.19.8
    tessera launch -n 2 -- python examples/gallery/resume_from_deepspeed.py
    loss at step 40: DeepSpeed 0.342, Tessera 0.342, which began at step 20
"""
import os

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")  # DeepSpeed on CPU ranks
import deepspeed  # noqa: E402  DeepSpeed itself
import tessera  # noqa: E402
import torch  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import nn  # noqa: E402

FOLDER, BATCH = "runs/resume_from_deepspeed", 64


def config(stage):
    return {"train_batch_size": BATCH, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 30}}, "zero_allow_untested_optimizer": True}


def start(library, stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
    engine, *_ = library.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), config=config(stage))
    return engine


def train(engine, first, last):
    """Trains steps first + 1 to last; the loss of the last one, over all ranks."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.bfloat16) / 8 - 1, torch.tensor(labels)
    for step in range(first, last):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:BATCH]
        mine = order[engine.global_rank::engine.world_size]
        loss = nn.functional.cross_entropy(engine(images[mine]).float(), labels[mine])
        engine.backward(loss)
        engine.step()
    mean = loss.detach() / engine.world_size
    torch.distributed.all_reduce(mean)
    return mean.item()


def main():
    deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled: Gloo is enough
    deepspeed.init_distributed(dist_backend="gloo")
    engine = start(deepspeed, 2)
    train(engine, 0, 20)
    engine.save_checkpoint(FOLDER)
    theirs = train(engine, 20, 40)

    engine = start(tessera, 3)
    engine.load_checkpoint(FOLDER)
    began = engine.global_steps
    ours = train(engine, began, 40)
    if engine.global_rank == 0:
        print(f"loss at step 40: DeepSpeed {theirs:.3f}, Tessera {ours:.3f}, which began at step {began}", flush=True)


if __name__ == "__main__":
    main()

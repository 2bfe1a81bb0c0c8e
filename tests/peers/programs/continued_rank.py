"""A rank of a row of continued_suite.py: `continued_rank.py LIBRARY GIVEN`, on the ranks of a launcher.

GIVEN is JSON: "model", "optimizer", "stages" or how the library is to work otherwise, "dtype", and "load" or "save". It trains 2 STEPS and saves
after STEPS, or loads what was saved there and goes on. A step's batch depends on its number alone, and each rank takes its part. Rank 0 prints, by
stage, the losses of the last STEPS steps: means over the batch.
"""
import importlib
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

STEPS, BATCH = 6, 6
CLIENT_STATE = {"epoch": 3, "best": (0.5, "x")}


class Logits(nn.Module):
    """A model of transformers, from tokens to logits. BERT has frozen embeddings; LoRA's base is frozen."""

    def __init__(self, kind):
        super().__init__()
        import transformers as hf

        if kind == "bert":
            self.model = hf.BertForMaskedLM(hf.BertConfig(
                vocab_size=65, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=50, max_position_embeddings=16,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, tie_word_embeddings=False))
            self.model.bert.embeddings.requires_grad_(False)
        else:
            self.model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=65, n_positions=16, n_embd=24, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                                                          attn_pdrop=0.0))
        if kind == "lora":
            from peft import LoraConfig, get_peft_model
            self.model = get_peft_model(self.model, LoraConfig(r=3, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"]))

    def forward(self, x):
        return self.model(input_ids=x).logits


class Net(nn.Module):
    """Sizes that no number of ranks divides; a tied parameter, a frozen one, and buffers of a BatchNorm that uses its running statistics."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(65, 23)
        self.norm = nn.BatchNorm1d(23).eval()
        self.norm.running_mean.normal_()
        self.frozen = nn.Linear(23, 23).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(23, 23) for _ in range(2))
        self.head = nn.Linear(23, 65)
        self.head.weight = self.embedding.weight

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        h = self.frozen(self.norm(self.embedding(x).transpose(1, 2)).transpose(1, 2))
        for block in self.blocks:
            h = h + block(h).tanh()
        return self.head(h)


def make_model(seed=None):
    """With other values where a checkpoint is loaded."""
    torch.manual_seed(int(given["load"] is not None) if seed is None else seed)
    return Net() if given["model"] == "net" else Logits(given["model"])


def make_optimizer(model):
    """And its schedule; neither where the configuration has them."""
    kind = given["optimizer"]
    trained = [p for p in model.parameters() if p.requires_grad]
    few = [p for p in trained if p.ndim <= 1]
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1}, *([{"params": few, "weight_decay": 0.0}] if few else [])]
    if kind == "configuration":
        return None, None
    if kind in ("bitsandbytes", "tessera"):  # with 8 bits for parameters as small as these
        optimizer = importlib.import_module(f"{kind}.optim").AdamW8bit(groups, lr=3e-3, betas=(0.9, 0.95), min_8bit_size=100)
    else:
        optimizer = {"AdamW": lambda: torch.optim.AdamW(trained, lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1),
                     "groups": lambda: torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95)), "AMSGrad": lambda: torch.optim.AdamW(trained, amsgrad=True),
                     "SGD": lambda: torch.optim.SGD(trained, lr=0.05, momentum=0.9, nesterov=True), "Adagrad": lambda: torch.optim.Adagrad(trained, lr=0.05)}[kind]()
    # DeepSpeed makes another Adagrad of the one that it is given, which a schedule does not see.
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1.0 if kind == "Adagrad" else 0.1, total_iters=2 * STEPS)


def loss_of(model, tokens):
    return functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def config(world, **more):
    by_itself = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.8, 0.95], "weight_decay": 0.1, "torch_adam": True}},
                 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 20, "warmup_max_lr": 3e-3}}}
    return {**(by_itself if given["optimizer"] == "configuration" else {}), "train_micro_batch_size_per_gpu": BATCH // world, "gradient_clipping": 1.0,
            "bf16": {"enabled": given["dtype"] == "bf16"}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **more}


# Each library returns a step, what saves, and what loads.

def of_engine(engine, load):
    def step(batch):
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss

    return step, lambda: engine.save_checkpoint(given["save"], client_state=CLIENT_STATE), load


def tessera(stage):
    import tessera as library

    model = make_model()
    optimizer, schedule = make_optimizer(model)
    world = library.comm.get_world_size()
    engine, *_ = library.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(world, zero_optimization={
        "stage": int(stage), "unit_numel": 2000, "stage3_param_persistence_threshold": 0}))
    return of_engine(engine, lambda: engine.load_checkpoint(given["load"]))


def deepspeed(stage):
    import deepspeed as library

    model = make_model(seed=0)  # its universal checkpoints restore neither frozen parameters nor buffers
    optimizer, schedule = make_optimizer(model)
    if given["load"]:
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, model.parameters()):
                p.zero_()
    engine, *_ = library.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(
        dist.get_world_size(), zero_optimization={"stage": int(stage)}, checkpoint={"load_universal": bool(given["load"])}))

    def load():
        path, client_state = engine.load_checkpoint(given["load"])
        assert path is not None and client_state.items() >= CLIENT_STATE.items(), client_state
        assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * BATCH)

    return of_engine(engine, load)


def of_loop(model, optimizer, schedule, save, load=None, backward=torch.Tensor.backward, clip=torch.nn.utils.clip_grad_norm_):
    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        backward(loss)
        clip(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss

    return step, save, load


def fsdp2(flatten):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for buffer in model.buffers() if given["load"] else ():
        buffer.zero_()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in next((list(child) for child in model.modules() if isinstance(child, nn.ModuleList)), []):
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, schedule = make_optimizer(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten == "flat")

    def state():
        weights, of_optimizer = get_state_dict(model, optimizer, options=options)
        return {"model": weights, "optimizer": of_optimizer, "lr_scheduler": schedule.state_dict(), "global_steps": STEPS if given["save"] else 0}

    def load():
        found = state()
        dcp.load(found, checkpoint_id=given["load"])
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=options)
        schedule.load_state_dict(found["lr_scheduler"])
        assert found["global_steps"] == STEPS

    return of_loop(model, optimizer, schedule, lambda: dcp.save(state(), checkpoint_id=given["save"]), load)


def accelerate(_):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)  # a step of it is one, on any number of ranks
    model = make_model()
    model, optimizer, schedule = accelerator.prepare(model, *make_optimizer(model))
    return of_loop(model, optimizer, schedule, lambda: accelerator.save_state(given["save"]), backward=accelerator.backward, clip=accelerator.clip_grad_norm_)


def plain(_):
    """DistributedDataParallel and torch.save."""
    model = make_model()
    optimizer, schedule = make_optimizer(model)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # BERT has one

    def save():
        if dist.get_rank() == 0:
            torch.save({"state_dict": wrapped.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict(), "step": STEPS}, given["save"])

    return of_loop(wrapped, optimizer, schedule, save)


def main():
    if LIBRARY == "tessera":
        import tessera as ours

        ours.comm.init_distributed(backend="auto")
        rank, world = ours.comm.get_rank(), ours.comm.get_world_size()
    else:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for stage in given["stages"]:
        step, save, load = globals()[LIBRARY](stage)
        if given["load"]:
            load()
        losses = []
        for i in range(STEPS if given["load"] else 0, 2 * STEPS):
            tokens = torch.randint(65, (BATCH, 13), generator=torch.Generator().manual_seed(i))
            loss = step(tokens[rank::world]).detach().float()
            if LIBRARY == "tessera":
                losses.append(ours.comm.all_reduce(loss.item()))  # the mean
            else:
                dist.all_reduce(loss := loss.clone())
                losses.append(loss.item() / world)
            if given["save"] and i == STEPS - 1:
                save()
        found[stage] = losses[-STEPS:]
    if rank == 0:
        print("numbers " + json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    LIBRARY, given = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    main()

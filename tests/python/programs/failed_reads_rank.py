"""Stage 3 over Gloo: rank 1 alone reads parameters in some way, and rank 0 ends. The argument is the way."""
import copy
import gc
import io
import sys

import tessera
import torch
from checks import config
from torch import nn

tessera.comm.init_distributed(backend="gloo")
rank, case = tessera.comm.get_rank(), sys.argv[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

    @torch.no_grad()
    def generate(self, x):
        for _ in range(3):
            x = torch.cat([self(x), x], 1)[:, :16]
        return x


torch.manual_seed(0)
model = Net()
engine = tessera.initialize(model=model, config=config(3, zero_optimization={
    "stage": 3, "unit_numel": 64, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}))[0]
engine.eval()
x, weight = torch.ones(1, 16), model.second.weight


def compiled():
    torch.compile(model, backend="aot_eager")(x)


def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)


def on_a_thread():
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        pool.submit(weight.norm).result()


def backward():
    with torch.enable_grad():
        torch.autograd.grad(model(x.requires_grad_()).sum(), [x])


def gathered():
    with tessera.GatheredParameters([weight]):
        pass


reads = {"module": lambda: model(x), "engine": lambda: engine(x), "generate": lambda: engine.generate(x), "norm": weight.norm,
         "item": lambda: weight[0, 0].item(), "print": lambda: print(weight), "numpy": lambda: weight.detach().numpy(),
         "deepcopy": lambda: copy.deepcopy(weight), "deepcopy_model": lambda: copy.deepcopy(model),
         "state_dict": lambda: model.state_dict()["second.weight"].clone(),
         "save_state_dict": lambda: torch.save(model.state_dict(), io.BytesIO()), "engine_state_dict": engine.state_dict,
         "save": lambda: torch.save(weight, io.BytesIO()), "tolist": weight.tolist,
         "to": lambda: weight.to(torch.float64), "compiled": compiled, "autocast": autocast, "thread": on_a_thread, "backward": backward,
         "gathered": gathered, "functional": lambda: torch.func.functional_call(model, {}, (x,))}

if case == "backward_alone":  # both run forward, rank 1 alone runs backward
    y = model(x.requires_grad_())
    if rank == 1:
        torch.autograd.grad(y.sum(), [x])
        print("NOT RAISED", flush=True)
elif case.startswith("view"):
    if rank == 1:
        weight.t()
        if case == "view_gone":
            del engine, model, weight, reads
            gc.collect()
        print("VIEWED", flush=True)
elif rank == 1:
    for way in case.split(","):
        try:
            with torch.no_grad():
                result = reads[way]()
        except RuntimeError as error:
            print("RAISED", way, type(error).__name__, str(error).splitlines()[0], flush=True)
        else:
            print("NOT RAISED", way, result, flush=True)

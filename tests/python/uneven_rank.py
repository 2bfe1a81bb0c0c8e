"""Two ranks use different parameters in their first forward at stage 3, where parameters travel: an error on both, which names them."""
import patterns
import tessera
import torch
from checks import config, train

torch.set_num_threads(1)
tessera.comm.init_distributed(backend="gloo", timeout_s=60, rendezvous_timeout_s=120)
make, batch_of, loss_of = patterns.cases()["a_branch_by_rank"]
torch.manual_seed(0)
engine, *_ = tessera.initialize(model=make(), config=config(3, 500))
train(engine, [[batch_of(rank) for rank in range(2)]], loss_of)

"""A classifier learns random data on the ranks of `torchrun --nproc-per-node 2`. README.md shows plain_loop.py beside tessera_loop.py."""
import os

import tessera
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
torch.distributed.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
inputs = torch.randn(2048, 32)
dataset = TensorDataset(inputs, inputs[:, :10].argmax(1))
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, _, _ = tessera.initialize(model=model, optimizer=optimizer, config={
    "train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": 3}})
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.5f}", flush=True)

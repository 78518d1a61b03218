"""Show the MFU of a training loop of Lightning Fabric, which has no Trainer for callbacks."""

from __future__ import annotations

import time

import torch
from lightning.fabric import Fabric

from lightning_perf import Every, Moment, Timestamp
from lightning_perf.flops import FlopCounter

PEAK = 312e12  # FLOP/s of one device: see `lightning-perf devices` and `lightning-perf measure`
fabric = Fabric(accelerator="auto", devices=1)
net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
batch = torch.randn(64, 256, device=fabric.device)


def step() -> None:
    """Train on one batch."""
    optimizer.zero_grad()
    fabric.backward(model(batch).square().mean())
    optimizer.step()


with FlopCounter() as counter:  # once per batch shape: it slows a step down
    step()
flops = counter.counts.model_flops

report = Every("50ba")
begun = time.perf_counter()
for done in range(1, 101):
    step()
    if report(Moment("train", Timestamp(batch=done), Timestamp(batch=done - 1))):
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        print(f"batch {done}: MFU {done * flops / seconds / PEAK:.3%}")

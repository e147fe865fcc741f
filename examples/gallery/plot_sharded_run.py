"""
A sharded run
=============

With ``fully_shard`` (FSDP2) every process holds a part of each parameter. The optimizer is given the sharded model;
each layer has an owner, gradients go to it and updates come back in one packed exchange each way. Here two processes on
one CPU, with half of the batch and half of every matrix each, take the steps that one process takes with all of it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

# %%
# The script that every process runs; on a cluster ``torchrun`` starts it. Three lines are about processes: the group,
# the mesh, and the sharded model; the optimizer is made after it.

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import layerwise as lw
from layerwise.data import digits

torch.manual_seed(0)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=world)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for child in model:
        fully_shard(child, mesh=mesh) if isinstance(child, nn.Linear) else None
    fully_shard(model, mesh=mesh)
opt = lw.optim.KFAC(model, lr=3e-3, estimator="empirical")
x, y = digits(512)
x, losses = x.flatten(1), []
for step in range(40):
    batch = torch.randint(512, (128,), generator=torch.Generator().manual_seed(step))
    mine = batch.chunk(world)[rank]
    opt.zero_grad()
    F.cross_entropy(model(x[mine]), y[mine]).backward()
    opt.step()
    with torch.no_grad():
        losses.append(F.cross_entropy(model(x), y).item())
if rank == 0:
    print(json.dumps(losses))
dist.destroy_process_group()
"""


def run(processes):
    with tempfile.TemporaryDirectory() as folder:
        script, meeting = Path(folder) / "train.py", (Path(folder) / "meeting").as_uri()
        script.write_text(SCRIPT, encoding="utf-8")
        started = [
            subprocess.Popen(
                [sys.executable, str(script), meeting],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(processes)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]
        answers = [process.communicate()[0] for process in started]
    return json.loads(answers[0].splitlines()[-1])


one, two = run(1), run(2)

# %%
# The curves lie on one another: they differ by the order of sums.

figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
axes.plot(one, linewidth=5, alpha=0.35, label="one process, 128 examples")
axes.plot(two, "k--", linewidth=1.2, label="two processes, 64 examples each")
axes.set(xlabel="step", ylabel="loss", title="K-FAC on digits")
axes.legend(frameon=False)
plt.show()
print(f"largest difference: {max(abs(a - b) for a, b in zip(one, two, strict=True)):.1e}")

"""
An optimizer of your own
========================

A member is mathematics: what is kept of a stack of layers ``[K, O, I]``, and a direction made of it. Momentum, decay,
AdamW's size, schedules, checkpoints, mixed precision and the fallback are the engine's. This rule normalises the
gradient of every neuron, a row of the weight, by a running mean of its square.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw
from layerwise.data import digits


class PerNeuron(lw.optim.UpdateRule):
    """``∇L / √v`` with one v a row."""

    name = "per neuron"
    formula = "∇L / √v, v a row's mean square"

    def init(self, shape, backend):
        return {
            "v": torch.zeros(shape.groups, shape.outputs, 1),
            "steps": torch.zeros(shape.groups, 1, 1),
        }  # by group, which is how it is saved

    def direction(self, state, grad, context):
        state["steps"] += 1
        state["v"].lerp_(grad.square().mean(-1, keepdim=True), 0.05)
        v = state["v"] / (1 - 0.95 ** state["steps"])  # no bias at the start
        return grad / (v.sqrt() + 1e-12)


class RowNormalised(lw.optim.Layerwise):
    def __init__(self, model, lr=1e-3, momentum=0.9, scale="adam", **options):
        super().__init__(model, rule=PerNeuron(), lr=lr, momentum=momentum, scale=scale, **options)


# %%
# It trains any model, at AdamW's rate.

x, y = digits()
x = x.flatten(1)


def losses(make, steps=120):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10))
    opt, found = make(model), []
    for step in range(steps):
        batch = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        opt.step()
        found.append(loss.item())
    return opt, torch.tensor(found).unfold(0, 8, 1).mean(1)


opt, own = losses(lambda model: RowNormalised(model, lr=3e-3, weight_decay=0.01))
_, adamw = losses(lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01))
print(opt)

figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
axes.semilogy(adamw, label="torch.optim.AdamW")
axes.semilogy(own, label="∇L / √v by row")
axes.set(xlabel="step", ylabel="loss, mean of 8 steps")
axes.legend(frameon=False)
plt.show()

# %%
# A rule with factors asks the backend for them, so that it runs fast on a GPU too: the
# :doc:`map of the code </architecture>` has one.

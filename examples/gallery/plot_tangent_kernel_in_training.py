"""
The tangent kernel through training
===================================

Lazy training leaves the kernel ``Θ = J Jᵀ`` as it is; training that learns features turns it towards the labels. A
tracker measures that in a loop of one's own.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw
from layerwise.data import digits

x, y = digits(600)
x = x.flatten(1)
keep = y < 2  # zeros and ones
x, y = x[keep], y[keep]

# %%
# The tracker takes snapshots on 60 examples at the steps that it chooses; every measure is of the centred kernel.


def followed(alpha):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    model = lw.linearized(model, alpha=alpha)  # outputs times α: the larger, the less parameters need to move
    opt = lw.regimes.rescaled(torch.optim.SGD(model.parameters(), lr=0.1), alpha)  # rate divided by α²
    tracker = lw.regimes.Tracker(model, (x[:60], y[:60]), every=10)
    for step in range(101):
        tracker(step)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return tracker.series()


learning, lazy = followed(1), followed(100)

# %%
# Alignment with the labels (centred kernel alignment), by layer, and the leading eigenvalue.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
left.plot(learning["step"], learning["cka"], linewidth=2.4, label="α = 1, whole kernel")
for name in (name for name in learning if name.startswith("cka/")):
    left.plot(learning["step"], learning[name], linewidth=1, label=f"α = 1, layer {name[4:]}")
left.plot(lazy["step"], lazy["cka"], "k--", label="α = 100, whole kernel")
left.set(xlabel="step", ylabel="alignment with the labels")
left.legend(frameon=False, fontsize=8)
for series, label in ((learning, "α = 1"), (lazy, "α = 100")):
    values = torch.tensor(series["eigenvalue/max"])
    right.plot(series["step"], values / values[0], label=label)
right.set(xlabel="step", ylabel="largest eigenvalue, over that at the start")
right.legend(frameon=False)
plt.show()

# %%
# :doc:`Lazy or learning? </guides/lazy_or_learning>` has what follows from it: noisy labels, spurious features, the
# order in which examples are learned.

"""
Every member in AdamW's place
=============================

One line of a training loop is exchanged, the rate stays. A network learns to recognise 8 × 8 digits with
``torch.optim.AdamW`` and with six members of ``lw.optim`` at the *same* rate and weight decay.
"""

from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw
from layerwise.data import digits

x, y = digits()
x = x.flatten(1)

# %%
# The loop knows nothing of the optimizer. An optimizer of the library takes the model, not its parameters: some members
# look at what layers see.


def losses(make, steps=150):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = make(model)
    found = []
    for step in range(steps):
        batch = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        opt.step()
        if step % 5 == 4:
            with torch.no_grad():
                found.append((step + 1, F.cross_entropy(model(x), y).item()))
    return found


options = {"lr": 3e-3, "weight_decay": 0.01}
curves = {"AdamW": losses(lambda model: torch.optim.AdamW(model.parameters(), **options))}
for kind in (lw.optim.KFAC, lw.optim.EKFAC, lw.optim.FOOF, lw.optim.Shampoo, lw.optim.SOAP, lw.optim.Muon):
    curves[kind.__name__] = losses(partial(kind, **options))

# %%
# The loss of all training images, on a logarithmic scale.

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name, curve in curves.items():
    axes.semilogy(*zip(*curve, strict=True), label=name, linewidth=2.4 if name in ("AdamW", "KFAC") else 1.2)
axes.set(xlabel="step", ylabel="training loss", title="digits, rate 3e-3 for all")
axes.legend(frameon=False, ncols=2)
plt.show()

# %%
# One seed, one small network: the table over eight tasks is in :doc:`decision 20
# </decisions/0020-updates-of-adamws-size>`, and each member has a :doc:`card </methods/index>`. ``print(opt)`` says
# what every parameter gets, and why:

print(lw.optim.KFAC(nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 10)), lr=3e-3))

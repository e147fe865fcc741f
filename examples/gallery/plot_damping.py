"""
How damping bends a step
========================

``(F + λI)⁻¹ ∇L`` is the natural gradient for small λ, and the gradient for large λ. K-FAC is near it in between, and
how near depends on where λ is added: to the product of the factors, or to each of them.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw
from layerwise.data import digits

torch.manual_seed(0)
x, y = digits(400)
x = x.flatten(1)
model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(30):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
opt.zero_grad()
F.cross_entropy(model(x), y).backward()
gradient = lw.ParamVector.grad(model)
exact, kfac, ekfac = (lw.fisher(model, (x, y), structure=s, estimator="exact") for s in ("dense", "kfac", "ekfac"))

# %%
# Cosines with the natural gradient of the same damping.


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


dampings = torch.logspace(-6, 1, 22).tolist()
curves = {"gradient": [], "K-FAC, λ on the factors": [], "K-FAC, λ on the product": [], "EKFAC": []}
for damping in dampings:
    natural = exact.solve(gradient, damping=damping)
    curves["gradient"].append(cosine(gradient, natural))
    curves["K-FAC, λ on the factors"].append(cosine(kfac.solve(gradient, damping=damping), natural))
    split = kfac.solve(gradient, damping=damping, damping_split="exact")
    curves["K-FAC, λ on the product"].append(cosine(split, natural))
    curves["EKFAC"].append(cosine(ekfac.solve(gradient, damping=damping), natural))

figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
for label, values in curves.items():
    axes.semilogx(dampings, values, label=label, color="0.6" if label == "gradient" else None)
axes.set(xlabel="damping λ", ylabel="cosine with the natural gradient", ylim=(0, 1.02))
axes.legend(frameon=False)
plt.show()

# %%
# Why both splits are offered: :doc:`decision 3 </decisions/0003-solve-splits-power-does-not>` and
# :doc:`numerical stability </numerical-stability>`.

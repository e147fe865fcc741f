"""
Which training examples matter
==============================

How much an example changes the model's own answer on it: its gradient g, in the metric of the inverse curvature,
``gᵀ (F + λI)⁻¹ g`` (self-influence). Wrong labels stand out, because the model can fit them only with parameters that
nothing else needs. Fifteen per cent of the labels below are wrong. Early in training their loss gives them away; here
the model has begun to learn them by heart, and the metric finds more of them than the loss does.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw
from layerwise.data import digits

torch.manual_seed(0)
x, y = digits(600)
x = x.flatten(1)
labels, wrong = lw.regimes.label_noise(y, classes=10, fraction=0.15, seed=1)
model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 10))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(1500):
    batch = torch.randint(len(x), (100,), generator=torch.Generator().manual_seed(step))
    opt.zero_grad()
    F.cross_entropy(model(x[batch]), labels[batch]).backward()
    opt.step()
with torch.no_grad():
    by_heart = (model(x).argmax(1) == labels)[wrong].float().mean()
print(f"wrong labels that the model has learnt: {by_heart:.0%}")

# %%
# Gradients of single examples are rows of the Jacobian, weighed with the residuals: the gradient of example n is
# ``J_nᵀ (p_n − e_n)``. One solve treats all of them as columns.

J = lw.jacobian(model, x).to_dense().reshape(len(x), 10, -1)
with torch.no_grad():
    residual = model(x).softmax(1) - F.one_hot(labels, 10)
gradients = torch.einsum("np,npd->dn", residual, J)
fisher = lw.fisher(model, (x, labels), structure="ekfac", estimator="exact")
influence = (gradients * fisher.solve(gradients, damping=1e-4)).sum(0)
loss = F.cross_entropy(model(x), labels, reduction="none").detach()
norm = gradients.square().sum(0)

# %%
# Of the examples that are looked at first, how many have a wrong label?

figure, axes = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
for score, label in ((influence, "gᵀ (F + λI)⁻¹ g"), (norm, "‖g‖²"), (loss, "loss")):
    found = wrong[score.argsort(descending=True)].cumsum(0) / wrong.sum()
    axes.plot(found, label=label)
    print(f"{label:18s}{float(found[int(wrong.sum()) - 1]):.0%} of them among the first {int(wrong.sum())}")
axes.plot([0, int(wrong.sum()), len(x)], [0, 1, 1], "k:", label="perfect")
axes.set(xlabel="examples looked at", ylabel="wrong labels found", xlim=(0, 300))
axes.legend(frameon=False)
plt.show()

# %%
# Influence of one example on another is the same product of two different gradients; a single test example is one
# solve.

test = gradients[:, :1]
effect = (gradients.T @ fisher.solve(test, damping=1e-3)).squeeze(1)
print(
    "helps example 0 most:",
    effect.argsort(descending=True)[:5].tolist(),
    "labels",
    labels[effect.argsort()[-5:]].tolist(),
)

"""
Uncertainty from the Fisher matrix
==================================

Laplace's approximation: near its maximum the posterior of a network is nearly a Gaussian whose precision is N F and the
prior's. ``F.sample`` draws from ``N(0, (F + λI)⁻¹)``, so that samples of the posterior are the trained parameters and a
scaled draw. Far from the data their outputs disagree.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw

torch.manual_seed(0)
x = torch.cat([torch.linspace(-4, -1.5, 40), torch.linspace(1, 4, 40)]).unsqueeze(1)
noise = 0.15
y = torch.sin(2 * x) + noise * torch.randn_like(x)
model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
opt = lw.optim.KFAC(model, lr=1e-2, likelihood="gaussian")
for _ in range(300):
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()
print(f"residual: {F.mse_loss(model(x), y).sqrt():.3f}, noise: {noise}")

# %%
# The likelihood's variance is that of the noise. The posterior's precision is ``N F + δ I`` with δ that of the prior;
# taken out of it, N divides the damping, and draws are scaled by ``1/√N``.

prior, N = 1.0, len(x)
fisher = lw.fisher(model, (x, y), structure="dense", likelihood="gaussian", variance=noise**2, estimator="exact")
draws = fisher.sample(200, damping=prior / N, generator=0)

# %%
# Linearised outputs: the Jacobian of the model at new points, times each draw. (Adding draws to the parameters
# themselves is the other way; for a network this small the two differ where the posterior is wide.)

new = torch.linspace(-6, 6, 200).unsqueeze(1)
J = lw.jacobian(model, new)
with torch.no_grad():
    mean = model(new).squeeze(1)
spread = torch.stack([(J @ draw).squeeze(1) for draw in draws]).div(N**0.5).std(0)

figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
for width, shade in ((2, 0.15), (1, 0.25)):
    axes.fill_between(
        new.squeeze(1), mean - width * spread, mean + width * spread, color="C0", alpha=shade, linewidth=0
    )
axes.plot(new, mean, color="C0")
axes.plot(x, y, "k.", markersize=4)
axes.set(xlabel="x", ylabel="y", ylim=(-4, 4), title="mean, and one and two standard deviations of the function")
plt.show()

# %%
# The same with K-FAC, which a large network would need: at some points it is off by a factor, not by orders.

factored = lw.fisher(model, (x, y), structure="kfac", likelihood="gaussian", variance=noise**2, estimator="exact")
parts = [(J @ draw).squeeze(1) for draw in factored.sample(200, damping=prior / N, generator=0)]
ratio = torch.stack(parts).div(N**0.5).std(0) / spread
print(f"standard deviations by K-FAC over the dense ones: {ratio.min():.2f} to {ratio.max():.2f}")

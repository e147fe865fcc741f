"""
Kernel regression with the tangent kernel
=========================================

A network that is trained a little moves along its tangents, and where that is all it does, its prediction is kernel
regression with ``Θ = J Jᵀ``. The kernel of the network at its start predicts what gradient descent on the *linearised*
network ends at; the network itself goes elsewhere when it learns features.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw

torch.manual_seed(0)
x = torch.linspace(-2, 2, 12, dtype=torch.float64).unsqueeze(1)
y = torch.sin(3 * x)
new = torch.linspace(-3, 3, 200, dtype=torch.float64).unsqueeze(1)
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()

# %%
# Regression on what the network does not say yet: ``f(x′) = f₀(x′) + Θ(x′, x) (Θ + ridge I)⁻¹ (y − f₀(x))``.

with torch.no_grad():
    f0, f0_new = model(x), model(new)
K = lw.ntk(model, x)
print(K.plan())
predicted = f0_new + K.predict(new, K.solve(y - f0, ridge=1e-6))

# %%
# The network, trained by gradient descent with all outputs multiplied by α: with a large α it is lazy.


def trained(alpha, steps=800):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    net = lw.regimes.Linearized(network, alpha, remind=False)  # f₀ + α (f − f₀); the rate below is divided by hand
    opt = torch.optim.Adam(net.parameters(), lr=1e-2 / alpha)
    for _ in range(steps):
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
    with torch.no_grad():
        return net(new)


figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
axes.plot(new, predicted, linewidth=4, alpha=0.4, label="kernel regression")
axes.plot(new, trained(100.0), "k--", linewidth=1, label="trained, α = 100 (lazy)")
axes.plot(new, trained(1.0), "C3", linewidth=1, label="trained, α = 1")
axes.plot(x, y, "ko", markersize=5)
axes.set(xlabel="x", ylabel="f(x)", ylim=(-3, 3))
axes.legend(frameon=False)
plt.show()

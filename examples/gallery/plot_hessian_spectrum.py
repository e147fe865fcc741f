"""
The spectrum of the Hessian
===========================

At initialisation and after training. With C classes about C − 1 eigenvalues stand out (and more of them when the
network is trained), the rest crowd near zero; the Gauss–Newton matrix has the large ones too, and no negative ones.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw
from layerwise.data import digits

x, y = digits(500)
x = x.flatten(1)
keep = y < 5
x, y = x[keep], y[keep]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 5))

# %%
# ``lw.hessian`` is implicit unless told otherwise: products go over the data, and leading eigenvalues come from
# Lanczos. This network has 1,405 parameters, so that all eigenvalues can be had.


def spectra():
    H = lw.hessian(model, (x, y), likelihood="categorical", structure="dense").eigenvalues()
    G = lw.ggn(model, (x, y), structure="dense", estimator="exact").eigenvalues()
    return H.sort(descending=True).values, G.sort(descending=True).values


start = spectra()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(60):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
end = spectra()

# %%
# The thirty largest, and a histogram of all (counts on a logarithmic scale).

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for (H, G), label, colour in ((start, "start", "C0"), (end, "trained", "C1")):
    left.semilogy(range(1, 31), H[:30].clamp(min=1e-6), "o", color=colour, markersize=4, label=f"Hessian, {label}")
    left.semilogy(range(1, 31), G[:30].clamp(min=1e-6), "-", color=colour, label=f"Gauss–Newton, {label}")
    right.hist(H.numpy(), bins=80, alpha=0.5, color=colour, label=label, log=True)
left.axvline(4.5, color="0.6", linestyle=":")
left.text(4.7, left.get_ylim()[1] * 0.3, "C − 1", color="0.4")
left.set(xlabel="rank", ylabel="eigenvalue")
left.legend(frameon=False, fontsize=8)
right.set(xlabel="eigenvalue of the Hessian", ylabel="count")
right.legend(frameon=False)
plt.show()
print(f"smallest eigenvalue of the trained network's Hessian: {end[0][-1]:.4f}")

# %%
# Of one layer, with the shape of its eigenvectors: :doc:`/guides/hessian_structure`.

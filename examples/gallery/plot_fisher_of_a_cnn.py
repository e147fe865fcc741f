"""
The Fisher matrix of a CNN
==========================

What structures keep of it. A small convolutional network has few enough parameters for the dense matrix, so that each
structure can be held against the truth: the picture of a layer's block, and two numbers that matter to users.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import layerwise as lw
from layerwise.data import digits

torch.manual_seed(0)
x, y = digits(300)
batch = x.reshape(-1, 1, 8, 8), y
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Tanh(),
    nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Tanh(),
    nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
print(lw.layers(model))

# %%
# ``estimator="exact"`` sums over all labels that the model might draw, rather than drawing some.

structures = ("dense", "block", "ekfac", "kfac", "diag")
F = {structure: lw.fisher(model, batch, structure=structure, estimator="exact") for structure in structures}

# %%
# The block of the second convolution, 8 output channels by 4 × 3 × 3 inputs and a bias. K-FAC takes positions of the
# image as independent examples, and does not keep the trace; EKFAC, in the same basis, does. Colours are of the
# square root.

figure, axes = plt.subplots(1, 4, figsize=(10, 3), layout="constrained")
for axis, structure in zip(axes, ("block", "ekfac", "kfac", "diag"), strict=True):
    block = F[structure].layer("2").to_dense()
    axis.imshow(block.abs().sqrt(), cmap="magma_r")
    axis.set(title=structure, xticks=[], yticks=[])
plt.show()

# %%
# *cos Fv*: the cosine of ``M v`` and ``F v``. *solve*: the cosine of v and ``(M + λI)⁻¹ (F + λI) v``. Means over
# random v.

damping = 1e-3
vectors = [lw.ParamVector.randn(model, generator=seed) for seed in range(10)]


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


print(f"{'':8s}{'trace':>10s}{'cos Fv':>10s}{'solve':>10s}")
for structure in structures:
    M = F[structure]
    product = sum(cosine(M @ v, F["dense"] @ v) for v in vectors) / len(vectors)
    solve = sum(cosine(M.solve(F["dense"] @ v + damping * v, damping=damping), v) for v in vectors) / len(vectors)
    print(f"{structure:8s}{float(M.trace()):10.4f}{product:10.3f}{solve:10.3f}")

# %%
# The same table for ResNet-18 and a transformer, with what to take for which purpose, is in
# :doc:`Which approximation for what </guides/which_approximation>`.

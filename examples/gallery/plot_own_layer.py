"""
A layer of your own
===================

A layer that the library does not know is not refused: its parameters get their exact block or diagonal, and AdamW's
step from K-FAC. A *rule* of four methods says what its inputs and output gradients are, and curvature, optimizers and
kernels treat it as a layer from then on.
"""

import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import layerwise as lw
from layerwise.layers.form import Form
from layerwise.testing import check_layer_rule


class Quadratic(nn.Module):
    """``y = W [x, x²] + b``."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, 2 * inputs) / (2 * inputs) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        a = torch.cat([x, x.square()], -1)
        return (a.unsqueeze(-2) * self.weight).sum(-1) + self.bias  # no matrix product, which would be recognised


def losses(steps=80):
    torch.manual_seed(0)
    x = torch.randn(512, 10) * torch.logspace(0, -2, 10)  # inputs of very different sizes
    y = (x[:, 0] * x[:, 1] + 0.3 * x[:, 2] > 0).long()
    model = nn.Sequential(Quadratic(10, 32), nn.Tanh(), Quadratic(32, 2))
    opt, found = lw.optim.KFAC(model, lr=1e-2, likelihood="categorical"), []
    for _ in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        found.append(loss.item())
    return opt, found


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that most parameters get AdamW's step
    without_rule, before = losses()
print(without_rule)

# %%
# The rule: one group, an O × I matrix with the bias as its last column; the input is ``[x, x²]``. The contract compares
# what follows from it with autograd, example by example, in float64.


@lw.layer_rule(Quadratic)
class QuadraticRule(lw.LayerRule[Quadratic]):
    def forms(self, module, parts):
        weight = parts.get("weight")  # not there if it is frozen
        return {"": Form(1, len(module.bias), module.weight.shape[1] if weight else 0, weight, parts.get("bias"))}

    def lead(self, module, site, x):
        return x.ndim - 1  # axes before the layer's own

    def inputs(self, module, site, x):  # [*lead, S, K, I]; the bias's 1 is added by the library
        return torch.cat([x, x.square()], -1).unsqueeze(-2).unsqueeze(-2)

    def outgrads(self, module, site, dy):  # [V, *lead, S, K, O]
        return dy.unsqueeze(-2).unsqueeze(-2)


check_layer_rule(Quadratic(3, 2), torch.randn(4, 3))
with_rule, after = losses()
print(with_rule)

# %%
# The same optimizer on the same model, before and after the rule was there.

figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
axes.semilogy(before, label="without a rule: AdamW's step")
axes.semilogy(after, label="with a rule: K-FAC's")
axes.set(xlabel="step", ylabel="loss")
axes.legend(frameon=False)
plt.show()

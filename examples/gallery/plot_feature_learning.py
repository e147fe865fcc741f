"""
Who finds the features
======================

The main result of Zhang et al. 2025 (arXiv 2502.01763) in twenty lines: a two-layer linear network, inputs that are
anisotropic, and a teacher of the same form. All methods lower the loss. Not all learn the teacher's representation.
"""

import matplotlib.pyplot as plt

from layerwise import feature_learning as fl

runs = {
    "SGD": fl.simulate("sgd", lr=1e-2, steps=250, seeds=2),
    "Adam": fl.simulate("adam", lr=1e-3, steps=250, seeds=2),
    "K-FAC": fl.simulate("kfac", lr=1e-2, steps=250, seeds=2),
}

# %%
# *Distance* is the sine of the largest angle between learned and true row space: 1 where some true direction was not
# found at all, 0 where all of them were.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for label, run in runs.items():
    left.semilogy(run.iteration, run.loss.median(0).values, label=label)
    right.plot(run.iteration, run.dist.median(0).values, label=label)
left.set(xlabel="iteration", ylabel="training loss")
right.set(xlabel="iteration", ylabel="distance to the true features", ylim=(0, 1.02))
left.legend(frameon=False)
plt.show()

# %%
# Rates here are one choice each; ``layerwise run lr-sweep`` tries thirteen of them for seven methods, and
# :doc:`the guide </guides/feature_learning>` says why no rate helps gradient descent.

"""`pac_bayes`: Algorithm 4 of Wu (2023), its variants, and the bound at the end."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.bounds.pac_bayes.options import Options
from layerwise.bounds.pac_bayes.result import PacBayes
from layerwise.bounds.pac_bayes.run import Run
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.progress import Progress, resolve
from layerwise.foundations.vectors import ParamVector


def pac_bayes(
    model: nn.Module,
    init: nn.Module | Mapping[str, Tensor] | ParamVector,
    data: Any,
    method: str = "iter",
    *,
    delta: float | int = 0.025,
    delta_draws: float | int = 0.01,
    cap: float | int = 0.1,
    precision: float | int = 100,
    epochs: int = 500,
    batch_size: int = 128,
    lr: float | int = 1e-3,
    decay: float | int = 0.3,
    milestones: Sequence[float | int] = (0.5, 0.75),
    interval: int = 10,
    initial: str | None = None,
    bias: str | None = None,
    optimizer: str = "rmsprop",
    loss_scale: float | int = 1 / math.log(2),
    draws: int = 2000,
    per_draw: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10,
    seed: int = 0,
    progress: bool | Progress | None = None,
) -> PacBayes:
    """A PAC-Bayes bound on the error of a network like the trained one, with noise on its weights.

    With probability 1 − δ − δ′ the posterior Q = N(w, S) that is found has an error on unseen data of at most

        kl⁻¹( kl⁻¹(ê, log(2/δ′)/n), B_RE ),   B_RE = (KL(Q ‖ P) + 2 log j + log(π²N/6δ))/(N − 1),

    ê the mean error of n drawn networks on the N training examples, P = N(θ₀, λ_j I), λ_j = cap · exp(−j/b), j ≥ 1.
    Mean, variances and λ minimize E[cross-entropy]/log 2 + √(B_RE/2) by stochastic gradients (Wu 2023, Algorithm 4).
    The posterior is diagonal

    - "base": in the standard basis (Dziugaite and Roy 2017);
    - "appr": in the eigenbasis of each layer's K-FAC factors, computed once, at the trained weights;
    - "iter": the same, computed anew every `interval` epochs at the mean;
    - "iter-d": the interval grows as the learning rate falls;
    - "iter-m": "iter" with the output factor replaced by (C.265), for chains of linear layers;
    - "ekfac": "iter" in EKFAC's basis, biases included, and its second moments h decide the variances at the start:
      s = 1/(1/λ + βh), the posterior that is best if the loss is quadratic with that curvature. Not in the thesis.

    >>> import copy, torch, layerwise as lw
    >>> x = torch.randn(200, 4)
    >>> y = (x[:, 0] > 0).long()
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> init = copy.deepcopy(model)
    >>> opt = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> for _ in range(100):
    ...     opt.zero_grad()
    ...     torch.nn.functional.cross_entropy(model(x), y).backward()
    ...     opt.step()
    >>> found = lw.bounds.pac_bayes(model, init, (x, y), "iter", epochs=20, lr=0.01, draws=200)
    >>> found.error <= found.bound_without_correction <= found.bound <= 1, found.j >= 1
    (True, True)

    Args:
        model: as trained; it is left as it was, and used in eval mode. What is not a trainable parameter (buffers,
            frozen weights) must be as in `init`: the prior may not depend on the data.
        init: the network before training, whose weights are the prior's mean θ₀; or a copy of its tensors by name,
            with buffers and frozen weights if there are any.
        data: all training data ``(x, y)``, or batches that can be gone through again (a list, a `DataLoader`). A bound
            counts on independent, distinct examples that `init` has not seen. Labels are class indices.
        method: see above.
        delta: δ, of the theorem.
        delta_draws: δ′, of the drawn networks' error.
        cap: c of the thesis; fixed in advance, as b is.
        precision: b of the thesis.
        epochs: over the data. The thesis has 2000.
        batch_size: of a whole data set; batches that are given are taken as they are.
        lr: at the beginning.
        decay: the rate is multiplied by it at each milestone. The thesis has 0.1.
        milestones: shares of all epochs. The thesis has (0.2, 0.4, 0.6, 0.8).
        interval: epochs between two computations of the bases.
        initial: variances at the start: "weights" is w² (as printed), "rotated" the squares of w in the bases,
            "curvature" 1/(1/λ + βh), with h from EKFAC, from products of K-FAC's eigenvalues, or, in the standard
            basis, the diagonal. By default "weights", and "curvature" for "ekfac".
        bias: "rotate" turns biases by the output basis alone, "leave" keeps them, "joint" counts them as columns of the
            weights, which is EKFAC's way. By default "rotate", and "joint" for "ekfac".
        optimizer: the thesis says gradient descent; the released code of Dziugaite and Roy has RMSprop.
        loss_scale: of the cross-entropy; the default 1/log 2 makes the cross-entropy an upper bound of the 0-1 error.
            The thesis has 1.
        draws: n, networks that are drawn in the end. The thesis has 50,000.
        per_draw: training examples that each of them is measured on, drawn for each; None: all of them, as batches
            that are given need it.
        checkpoint: a file to go on from and to write to; one of another model, other data or options is refused.
        checkpoint_every: epochs.
        seed: of the noise and of the order of the data.
        progress: True, False, or an object with `track`; by default a bar with the current bound on a terminal.
    """
    if not isinstance(milestones, Sequence) or isinstance(milestones, str):
        raise InputError(describe(f"milestones={milestones!r}", "shares of all epochs", "take e.g. (0.5, 0.75)"))
    options = Options(
        method=method,
        delta=delta,
        delta_draws=delta_draws,
        cap=cap,
        precision=precision,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        decay=decay,
        milestones=tuple(milestones),
        interval=interval,
        initial=initial,
        bias=bias,
        optimizer=optimizer,
        loss_scale=loss_scale,
        seed=seed,
        draws=draws,
        per_draw=per_draw,
    )
    with ExitStack() as stack:  # in the weights' own dtype, and with gradients, whatever the caller is in
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        run = Run(model, init, data, options, resolve(progress))
        if checkpoint is not None:
            run.keep(Path(checkpoint), checkpoint_every)
        return run.finished(run.optimized())

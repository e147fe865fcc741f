"""`DictionaryLearner`: a dictionary learned from samples, coordinates hidden or not, as a scikit-learn transformer."""

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from layerwise.foundations.errors import InputError, describe, not_one_of
from layerwise.foundations.progress import Progress, resolve
from layerwise.foundations.random import stream
from layerwise.selfsup.sparse_coding.data import unit_columns
from layerwise.selfsup.sparse_coding.estimator import Estimator, Samples
from layerwise.selfsup.sparse_coding.losses import heldout_masked_loss, hidden_count
from layerwise.selfsup.sparse_coding.omp import omp
from layerwise.selfsup.sparse_coding.stopping import RULES, Best
from layerwise.selfsup.sparse_coding.training import Make, train_dictionaries

SCORED = 0.1
"""The share of coordinates that is hidden at a time where dictionaries are compared."""


class DictionaryLearner(Estimator):
    """A dictionary B of unit atoms with y ≈ B z, z k-sparse; codes by `omp`, B by descent.

    With ``hidden_fraction > 0`` (Wu 2023, "masking") a tenth of the coordinates, drawn anew for each batch, is hidden
    from the codes, and the loss is of those alone: noise cannot be fitted, and B may have more atoms than the truth.
    With 0 the loss is of all coordinates, and more atoms than the truth represent noise.

    It follows scikit-learn's conventions, and takes tensors as well as arrays, on any device. `score` is minus the mean
    squared error of hidden coordinates, a tenth of them at a time whatever `hidden_fraction` is, so that a grid search
    may choose the number of atoms, and that fraction.

    Attributes after `fit`: `components_` (atoms as rows), `dictionary_` (as columns), `n_iter_` (epochs until the
    dictionary that was kept), `history_` (with early stopping: epochs, and held-out losses), `n_features_in_`.

    >>> from layerwise.selfsup import DictionaryLearner, recovery_error, sample_sparse_data
    >>> data = sample_sparse_data(d=20, p=20, k=2, n=400, sigma=0.02)
    >>> learner = DictionaryLearner(n_atoms=30, k=2, lr=0.01, epochs=30, batch_size=50).fit(data.Y)
    >>> float(recovery_error(data.A, learner.dictionary_)) < 0.1
    True
    >>> learner.transform(data.Y).count_nonzero(1).unique()
    tensor([2])
    """

    components_: Any
    dictionary_: Any
    n_iter_: int
    history_: dict[str, list[float]]

    def __init__(
        self,
        n_atoms: int | None = None,
        k: int | None = None,
        *,
        hidden_fraction: float | int = 0.1,
        init: Any = "sample",
        lr: float | int = 1e-3,
        batch_size: int = 200,
        epochs: int = 500,
        early_stopping: bool = False,
        stop_by: str = "masked",
        validation_fraction: float | int = 0.1,
        check_every: int = 5,
        patience: int = 10,
        normalize: bool = False,
        optimizer: Make | None = None,
        callback: Callable[[int, Tensor], object] | None = None,
        random_state: Any = 0,
        device: str | None = None,
        progress: bool | Progress | None = None,
    ) -> None:
        """Store the options.

        Args:
            n_atoms: columns of B; None, as many as coordinates. More than there are in truth is safe with masks.
            k: atoms a sample; None, a tenth of the coordinates, as in scikit-learn.
            hidden_fraction: share of coordinates that is hidden from codes; 0 for the standard objective.
            init: "sample" (rows of X, which are then not trained on if at least as many remain), "gauss", or a matrix
                of atoms as columns ``[d, n_atoms]`` (or as rows, where the shape says so).
            lr: of Adam.
            batch_size: samples a step.
            epochs: passes over X, at most.
            early_stopping: keep the dictionary with the least loss of samples that are not trained on, and stop when it
                has not become less for a while.
            stop_by: which loss: "masked" (what of those samples is hidden), or "reconstruction" (all of them), which
                needs fewer samples to find the moment, but cannot tell whether there are too many atoms.
            validation_fraction: the share of those samples.
            check_every: epochs between looks at them.
            patience: looks without a lower loss after which training stops.
            normalize: see `omp`; for `fit`, early stopping and `score`, where coordinates are hidden. Without, atoms
                have norm 1, and it changes nothing.
            optimizer: from a list of one parameter, atoms as rows ``[n_atoms, d]``, to an optimizer other than Adam.
            callback: called with the epoch and the dictionary after each epoch; a truth value stops training.
            random_state: a seed, or a generator of PyTorch or NumPy; None is 0.
            device: where to compute; by default where X is.
            progress: a bar while epochs pass; None, on a terminal alone.
        """
        self.n_atoms = n_atoms
        self.k = k
        self.hidden_fraction = hidden_fraction
        self.init = init
        self.lr = lr
        self.batch_size = batch_size
        self.epochs = epochs
        self.early_stopping = early_stopping
        self.stop_by = stop_by
        self.validation_fraction = validation_fraction
        self.check_every = check_every
        self.patience = patience
        self.normalize = normalize
        self.optimizer = optimizer
        self.callback = callback
        self.random_state = random_state
        self.device = device
        self.progress = progress

    def fit(self, X: Samples, y: object = None) -> "DictionaryLearner":
        """Learn a dictionary of the rows of X; y is ignored."""
        rows = self._samples(X, fitting=True, device=self._device(X))
        n, d = rows.shape
        self._check_kinds()
        q, k = d if self.n_atoms is None else self.n_atoms, self._k(d)
        self._check(n, d, q, k)
        random = _generator(self.random_state)
        held = round(self.validation_fraction * n) if self.early_stopping else 0
        order = torch.randperm(n, generator=random).to(rows.device)
        validation, training = rows[order[:held]], rows[order[held:]]
        B, training = self._start(training, q, random)
        hidden = hidden_count(d, self.hidden_fraction) if self.hidden_fraction else 0
        best = None
        if self.early_stopping:
            fraction = self.hidden_fraction or SCORED
            best = Best(validation, k, fraction, self.patience, self.stop_by, normalize=self.normalize)
        epochs_run = [0]

        def watch(epoch: int, dictionaries: Tensor) -> bool:
            epochs_run[0] = epoch
            told = epoch and self.callback is not None and bool(self.callback(epoch, dictionaries[0]))
            due = epoch % self.check_every == 0 or epoch == self.epochs
            return bool(best is not None and due and best.look(epoch, dictionaries[0])) or bool(told)

        (B,) = train_dictionaries(
            training[None],
            B[None],
            k,
            hidden=[hidden],
            generators=[random],
            lr=self.lr,
            batch_size=self.batch_size,
            epochs=self.epochs,
            optimizer=self.optimizer,
            watch=watch,
            normalize=self.normalize,
            progress=resolve(self.progress),
        )
        self.n_iter_, self.history_ = epochs_run[0], {}
        if best is not None:
            B, self.n_iter_, self.history_ = best.dictionary, best.epoch, best.history
        self.dictionary_, self.components_ = self._like(B.contiguous(), X), self._like(B.mT.contiguous(), X)
        self.n_features_in_ = d
        return self

    def transform(self, X: Samples) -> Any:
        """Codes of the rows of X, ``[n, n_atoms]``, k of them not zero."""
        rows = self._samples(X, fitting=False, device=self._device(X))
        B = torch.as_tensor(self.dictionary_).to(rows)
        return self._like(omp(rows, B, self._k(rows.shape[1]), normalize=self.normalize).dense(B.shape[1]), X)

    def fit_transform(self, X: Samples, y: object = None) -> Any:
        """`fit`, then `transform` of the same samples."""
        return self.fit(X, y).transform(X)

    def inverse_transform(self, codes: Samples) -> Any:
        """Samples from their codes: B z."""
        if not self.__sklearn_is_fitted__():
            self._samples(codes, fitting=False, device="cpu")  # says so
        components = torch.as_tensor(self.components_)
        z = codes if isinstance(codes, Tensor) else torch.as_tensor(codes)
        if z.ndim != 2 or z.shape[1] != len(components):
            given = f"codes of shape {tuple(z.shape)} for {len(components)} atoms"
            raise InputError(describe(given, f"[n, {len(components)}], as transform gives", "give whole rows"))
        return self._like(z.to(components) @ components, codes)

    def score(self, X: Samples, y: object = None) -> float:
        """Minus the mean squared error of hidden coordinates of the rows of X: larger is better.

        Every coordinate is hidden once, a tenth of them at a time (fewer, if k would not leave so many).
        """
        rows = self._samples(X, fitting=False, device=self._device(X))
        B, d = torch.as_tensor(self.dictionary_).to(rows), rows.shape[1]
        k = self._k(d)
        if k >= d:
            given = f"k={k} atoms a sample of {d} coordinate(s)"
            raise InputError(describe(given, "fewer atoms than coordinates, to hide one", "take a smaller k"))
        hidden = min(hidden_count(d, SCORED), d - k)
        return -float(heldout_masked_loss(rows, B, k, hidden / d, normalize=self.normalize)) / hidden

    def get_feature_names_out(self, input_features: object = None) -> Any:
        """Names of the columns of `transform`: dictionarylearner0, dictionarylearner1, …"""
        import numpy as np

        if not self.__sklearn_is_fitted__():
            self._samples(np.zeros((1, 1)), fitting=False, device="cpu")  # says so
        return np.array([f"dictionarylearner{i}" for i in range(len(self.components_))], dtype=object)

    def _device(self, X: Samples) -> torch.device | str:
        try:
            return torch.device(self.device or (X.device if isinstance(X, Tensor) else "cpu"))
        except (RuntimeError, TypeError) as error:
            given = f"device={self.device!r}"
            raise InputError(describe(given, "a device of PyTorch", "pass e.g. 'cpu' or 'cuda'")) from error

    def _k(self, d: int) -> int:
        return max(1, d // 10) if self.k is None else self.k

    def _check_kinds(self) -> None:
        optional = [name for name in ("n_atoms", "k") if getattr(self, name) is not None]
        for name in (*optional, "batch_size", "epochs", "check_every", "patience"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise InputError(describe(f"{name}={value!r}", "a positive whole number", "correct it"))
        for name in ("lr", "hidden_fraction", "validation_fraction"):
            value = getattr(self, name)
            if not isinstance(value, float | Integral) or not 0 <= float(value) < math.inf:
                raise InputError(describe(f"{name}={value!r}", "a finite number ≥ 0", "take e.g. the default"))
        if not self.lr > 0:
            raise InputError(describe(f"lr={self.lr}", "a positive number", "correct it"))

    def _check(self, n: int, d: int, q: int, k: int) -> None:
        hidden = hidden_count(d, self.hidden_fraction) if self.hidden_fraction else 0
        if not 1 <= k <= min(q, d - hidden):
            given = f"k={k} of {q} atoms, with {d - hidden} visible coordinates of {d}"
            raise InputError(describe(given, f"1 ≤ k ≤ {min(q, d - hidden)}", "take another k, or hide less"))
        if self.early_stopping and not 1 <= round(self.validation_fraction * n) < n:
            given = f"validation_fraction={self.validation_fraction} of n_samples={n}"
            raise InputError(describe(given, "some samples to look at, and some to train on", "give more samples"))
        if self.stop_by not in RULES:
            raise InputError(not_one_of("stop_by", self.stop_by, RULES))

    def _start(self, rows: Tensor, q: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Where B starts, and the samples that remain."""
        n, d = rows.shape
        if self.init is not None and not isinstance(self.init, str):
            B = torch.as_tensor(self.init).detach().to(rows)
            if B.shape not in ((d, q), (q, d)):
                given = f"init of shape {tuple(B.shape)}"
                raise InputError(describe(given, f"atoms as columns, {[d, q]}", "give n_atoms columns"))
            B = unit_columns(B if B.shape == (d, q) else B.mT)
            if not bool(torch.isfinite(B).all()):
                given = "init with atoms that are zero or not finite"
                raise InputError(describe(given, "atoms that are directions", "leave such atoms out, or draw them"))
            return B, rows
        if self.init not in ("sample", "gauss"):
            raise InputError(not_one_of("init", self.init, ("sample", "gauss", "a matrix of atoms")))
        drawn = torch.randn(d, q, generator=random, dtype=rows.dtype).to(rows.device)
        if self.init == "sample":
            usable = (rows.norm(dim=-1) > 0).nonzero()[:q, 0]  # already in a random order
            drawn[:, : len(usable)] = rows[usable].mT
            if n >= 2 * q:
                rest = torch.ones(n, dtype=torch.bool, device=rows.device)
                rest[usable] = False
                rows = rows[rest]
        return unit_columns(drawn), rows


def _generator(state: Any) -> torch.Generator:
    if isinstance(state, torch.Generator):
        return state
    draw = getattr(state, "integers", getattr(state, "randint", None))  # NumPy's generators, new and old
    if draw is None and not isinstance(state, Integral | None):
        given = f"random_state={state!r}"
        raise InputError(describe(given, "a seed, or a generator of PyTorch or NumPy", "pass e.g. 0"))
    seed = int(state or 0) if draw is None else int(draw(2**31 - 1))
    return stream(seed, "dictionary learner")

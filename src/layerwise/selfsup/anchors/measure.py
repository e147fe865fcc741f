"""`anchors`: does one vector predict the log partition function of a language model's less likely words?"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from layerwise.foundations import device as bytes_of
from layerwise.foundations.errors import InputError, describe
from layerwise.foundations.modes import evaluating
from layerwise.foundations.progress import Progress, resolve
from layerwise.foundations.random import stream
from layerwise.selfsup.anchors import language_model
from layerwise.selfsup.anchors.corpus import batches, token_ids, windows
from layerwise.selfsup.anchors.least_squares import CHUNK, Folded, fold, nearest, several, together
from layerwise.selfsup.anchors.log_partition import Dictionary, Transform, log_partitions, refuse_k
from layerwise.selfsup.anchors.report import AnchorReport, AnchorRow, Cone, Fit

K = (0, 10, 100, 1000)


def anchors(
    model: nn.Module | str | os.PathLike[str],
    corpus: Any,
    *,
    tokenizer: Any = None,
    head: nn.Module | str | None = None,
    transform: Transform | None = None,
    k: Sequence[int] | int | None = None,
    n_anchors: int = 1,
    positions: int = 2**16,
    window: int | None = None,
    stride: int | None = None,
    controls: bool = True,
    chunk: int | None = None,
    memory: int | float | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
) -> AnchorReport:
    """Anchor vectors of a language model: ⟨h, v_0⟩ ≈ log Z_bulk, over the positions of a corpus.

    h is what the output layer is given, Z_bulk(x) sums exp(logit) over all words but the k likeliest at x, and v_0 is
    found by least squares. Beside it stand predictors that need no anchor, and the same for dictionaries that know no
    words: without them a small error says little (Wu 2023, section 3.4, has none).

    >>> import torch, layerwise as lw
    >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 50))
    >>> found = lw.selfsup.anchors(model, torch.randint(50, (40, 16)), head="2", k=(0, 5))
    >>> found.positions, found.rows[5].k
    (640, 5)

    Args:
        model: a causal language model of Hugging Face; its folder or name (only what is on this machine: nothing is
            downloaded); or any module that maps token ids to logits, with `head`.
        corpus: text (or a path to it, or a list of texts), token ids ``[N]`` or in windows ``[W, T]`` (a tensor, an
            array or lists), or batches that the model takes as they are (mappings with an ``attention_mask`` leave
            padding out; one mapping, as a tokenizer gives it, is one batch).
        tokenizer: for text; by default the one that lies in the model's folder.
        head: the output layer, or its name; by default ``model.get_output_embeddings()``.
        transform: what the model does to each logit after the head, such as soft-capping; without it such models
            are refused.
        k: numbers of likeliest words that are left out of the bulk; by default those of 0, 10, 100 and 1000 that
            leave half of the words.
        n_anchors: more than one for models whose log Z_bulk forms clusters, as GPT-2's does.
        positions: at most so many, from the start of the corpus; the first half is fitted, the second is the test.
        window: tokens of a window; by default the model's context, at most 1024.
        stride: tokens by which windows of running text are apart, 512 by default; each position is counted once.
        controls: also measure a dictionary of random atoms, and one shuffled over words.
        chunk: positions whose logits are held at once.
        memory: bytes that the states may take (positions × width × 4); by default half of what is free.
        seed: of the controls.
        progress: None shows a bar on a terminal only.
    """
    if isinstance(model, str | os.PathLike):
        readable = isinstance(corpus, str | os.PathLike | list | tuple)
        tokenizer = language_model.load_tokenizer(model) if tokenizer is None and readable else tokenizer
        model = language_model.load(model)
    opened = language_model.open_model(model, head, transform)
    words = opened.dictionary.words
    chosen = _chosen(k, words)
    if not isinstance(positions, Integral) or positions < 2:
        raise InputError(describe(f"positions={positions}", "a whole number ≥ 2", "leave it out"))
    if window is not None and opened.longest is not None and window > opened.longest:
        given = f"window={window} for a model with a context of {opened.longest}"
        raise InputError(describe(given, f"at most {opened.longest}", "leave it out"))
    ids = token_ids(corpus, tokenizer, opened.vocabulary, opened.longest)
    length = min(window or opened.context, positions)
    if length < 1:
        raise InputError(describe(f"window={window}", "a number of tokens ≥ 1", "leave it out"))
    parts = (
        batches(corpus, opened.vocabulary, opened.longest) if ids is None else windows(ids, length, stride, positions)
    )
    total = None if ids is None else min(positions, ids.numel())
    _refuse_memory(total or 0, opened.dictionary, memory)
    bar = resolve(progress)
    states, following, count = [], [], 0
    with torch.no_grad(), evaluating(opened.model), language_model.HeadInput(opened) as seen:
        expected = None if total is None or ids is None or ids.dim() == 2 else -(-total // (stride or 512))
        for part in bar.track(parts, "states", expected):
            h = seen.states(part)[: positions - count]
            count += len(h)
            _refuse_memory(count, opened.dictionary, memory)
            states.append(h.cpu())
            if part.following is not None:
                following.append(part.following[: len(h)].cpu())
            if count >= positions:
                break
    if not states:
        raise InputError(describe("an empty corpus", "text, token ids or batches", "give some"))
    return anchors_of(
        torch.cat(states),
        opened.dictionary.atoms,
        bias=opened.dictionary.bias,
        transform=transform,
        following=torch.cat(following) if following else None,
        k=chosen,
        n_anchors=n_anchors,
        controls=controls,
        chunk=chunk,
        seed=seed,
        progress=progress,
    )


def anchors_of(
    states: Float[Tensor, "N d"],
    atoms: Float[Tensor, "n d"],
    *,
    bias: Float[Tensor, "n"] | None = None,
    transform: Transform | None = None,
    following: Int[Tensor, "N"] | None = None,
    k: Sequence[int] | int | None = None,
    n_anchors: int = 1,
    controls: bool = True,
    chunk: int | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
) -> AnchorReport:
    """The same for states and a dictionary that you have: rows of `atoms` are words.

    >>> import torch, layerwise as lw
    >>> found = lw.selfsup.anchors_of(torch.randn(400, 5), torch.randn(30, 5) + 1, k=(0, 3))
    >>> found.words, len(found.anchors[3][0])
    (30, 5)

    Args:
        states: h, one row a position, in the order of the text.
        atoms: the output embedding.
        bias: of the output layer; it becomes a column of the dictionary, and states get a 1.
        transform: applied to logits.
        following: the word that comes next at each position, −1 for none; for the perplexity.
        k, n_anchors, controls, chunk, seed, progress: as for `anchors`.
    """
    _refuse_shapes(states, atoms, bias, following)
    dictionary = Dictionary(atoms=atoms, bias=bias, transform=transform)
    _refuse(states, dictionary, n_anchors)
    k = _chosen(k, dictionary.words)
    wide = dictionary.widen(states).cpu()
    everywhere = (0, *(each for each in k if each))  # log Z itself gives the probability of the bulk
    bar = resolve(progress)
    dictionaries = {"": dictionary}
    if controls:
        dictionaries |= {"gaussian": dictionary.gaussian(seed), "shuffled": dictionary.shuffled(seed)}
    partitions = {
        name: torch.cat(list(bar.track(log_partitions(states, each, everywhere, chunk), f"log Z {name}".strip(), None)))
        for name, each in dictionaries.items()
    }
    order = torch.randperm(len(wide), generator=stream(seed, "anchors", "positions"))
    targets = torch.cat([y for found in partitions.values() for y in (found, found[order])], dim=1)
    half = torch.arange(len(wide)) < (len(wide) + 1) // 2
    places = [half.nonzero()[:, 0], (~half).nonzero()[:, 0]]
    fitted, tested = (fold(wide, targets, at) for at in places)
    halves = _Halves(wide, fitted, tested, places[1])
    found: dict[str, dict[int, AnchorRow]] = {}
    for place, (name, each) in enumerate(dictionaries.items()):
        y, first = partitions[name], 2 * place * len(everywhere)
        mean_atom = each.columns.double().mean(0).cpu()
        found[name] = {
            kk: halves.row(kk, y[:, i], y[:, 0], first + i, first + len(everywhere) + i, mean_atom)
            for i, kk in enumerate(everywhere)
            if kk in k
        }
    solved = halves.whole.solve(halves.whole.states, halves.whole.targets)
    vectors = {kk: solved[:, [i]].mT for i, kk in enumerate(everywhere) if kk in k}
    if n_anchors > 1:
        for i, kk in enumerate(everywhere):
            if kk in k:
                y = partitions[""][:, i]
                found[""][kk], vectors[kk] = halves.with_several(found[""][kk], y, y[order], n_anchors, places[0])
    return AnchorReport(
        rows={kk: found[""][kk] for kk in k},
        controls={name: rows for name, rows in found.items() if name},
        anchors=vectors,
        cone=_cone(atoms, seed),
        positions=len(wide),
        width=wide.shape[1],
        words=dictionary.words,
        perplexity=_perplexity(states, dictionary, partitions[""][:, 0], following, chunk),
    )


def _chosen(k: Sequence[int] | int | None, words: int) -> tuple[int, ...]:
    if k is None:
        return tuple(each for each in K if 2 * each < words)
    chosen = tuple(k) if isinstance(k, Iterable) else (k,)
    refuse_k(chosen, words)
    return chosen


class _Halves:
    """Positions that are fitted and positions that are the test."""

    def __init__(self, states: Tensor, fitted: Folded, tested: Folded, places: Tensor) -> None:
        self.states, self.fitted, self.tested, self.places = states, fitted, tested, places
        self.whole = together([fitted, tested])
        self.variance = self.whole.variance()
        self.spread = tested.variance().clamp_min(torch.finfo(torch.float64).tiny)
        self.means = self.whole.mean(self.whole.targets)
        self.mean_state = fitted.mean(fitted.states)

    def row(self, k: int, y: Tensor, log_z: Tensor, column: int, shuffled: int, mean_atom: Tensor) -> AnchorRow:
        bulk = (y - log_z).exp()
        atom_r2, slope = self._mean_atom(column, mean_atom)
        return AnchorRow(
            k=k,
            mean=float(self.means[column]),
            variance=float(self.variance[column]),
            bulk_probability=float(bulk.mean()),
            least_bulk_probability=float(bulk.min()),
            anchor=self._fit(y, column, intercept=False),
            with_intercept=self._fit(y, column, intercept=True),
            mean_atom=atom_r2,
            mean_atom_slope=slope,
            mean_state=self._two_numbers(column, self.mean_state),
            shuffled_positions=self._r2(shuffled, lambda data: torch.cat([data.states, data.ones], 1)),
        )

    def _fit(self, y: Tensor, column: int, intercept: bool) -> Fit:
        def features(data: Folded) -> Tensor:
            return torch.cat([data.states, data.ones], 1) if intercept else data.states

        target = slice(column, column + 1)
        everywhere = self.whole.solve(features(self.whole), self.whole.targets[:, target])
        v = self.fitted.solve(features(self.fitted), self.fitted.targets[:, target])
        mse = self.whole.mean_square(features(self.whole) @ everywhere - self.whole.targets[:, target])
        heldout = self.tested.mean_square(features(self.tested) @ v - self.tested.targets[:, target])
        width = self.states.shape[1]
        constant = float(v[width]) if intercept else 0.0
        predicted = torch.cat([self.states[at].double() @ v[:width, 0] for at in self.places.split(CHUNK)]) + constant
        return _summary(mse, float(heldout), float(self.spread[column]), predicted - y[self.places])

    def _r2(self, column: int, features: Any) -> float:
        target = slice(column, column + 1)
        v = self.fitted.solve(features(self.fitted), self.fitted.targets[:, target])
        left = self.tested.mean_square(features(self.tested) @ v - self.tested.targets[:, target])
        return 1 - float(left) / float(self.spread[column])

    def _two_numbers(self, column: int, direction: Tensor) -> float:
        return self._r2(column, lambda data: torch.cat([data.states @ direction[:, None], data.ones], 1))

    def _mean_atom(self, column: int, atom: Tensor) -> tuple[float, float]:
        """R² with slope 1, and the slope that least squares would take."""

        def left(data: Folded) -> Tensor:
            return data.targets[:, column : column + 1] - data.states @ atom[:, None]

        constant = self.fitted.mean(left(self.fitted))
        error = float(self.tested.mean_square(left(self.tested) - self.tested.ones * constant))
        along = torch.cat([self.fitted.states @ atom[:, None], self.fitted.ones], 1)
        slope = float(self.fitted.solve(along, self.fitted.targets[:, column : column + 1])[0])
        return 1 - error / float(self.spread[column]), slope

    def with_several(
        self, row: AnchorRow, y: Tensor, shuffled: Tensor, n_anchors: int, fitted: Tensor
    ) -> tuple[AnchorRow, Tensor]:
        test = self.places

        def heldout(target: Tensor) -> Tensor:
            vectors = several(self.states[fitted], target[fitted], n_anchors)
            return nearest(self.states[test], target[test], vectors)[0]

        everywhere = several(self.states, y, n_anchors)
        mse = nearest(self.states, y, everywhere)[0].square().mean()
        residuals, chance = heldout(y), heldout(shuffled)
        spread = float(y[test].var(correction=0).clamp_min(torch.finfo(torch.float64).tiny))
        fit = _summary(mse, float(residuals.square().mean()), spread, residuals)
        by_chance = 1 - float(chance.square().mean()) / float(shuffled[test].var(correction=0).clamp_min(1e-300))
        return replace(row, several=fit, several_shuffled=by_chance), everywhere


def _summary(mse: Tensor, heldout: float, spread: float, residuals: Tensor) -> Fit:
    errors = residuals.abs().sort().values
    return Fit(
        mse=float(mse),
        heldout_mse=heldout,
        r2=1 - heldout / spread,
        p99_error=float(errors[math.ceil(0.99 * len(errors)) - 1]),
        max_error=float(errors[-1]),
    )


def _cone(atoms: Tensor, seed: int, pairs: int = 10_000) -> Cone:
    chosen = torch.randint(len(atoms), (2, pairs), generator=stream(seed, "anchors", "pairs")).to(atoms.device)
    chosen = chosen[:, chosen[0] != chosen[1]]
    cosines = nn.functional.cosine_similarity(atoms[chosen[0]].double(), atoms[chosen[1]].double())
    products = torch.zeros(atoms.shape[1], atoms.shape[1], dtype=torch.float64)
    for part in atoms.split(8192):
        products += (part.double().mT @ part.double()).cpu()
    squares = torch.linalg.eigvalsh(products)
    norms = atoms.double().norm(dim=1)
    return Cone(
        norm=float(norms.mean()),
        norm_deviation=float(norms.std()),
        cosine=float(cosines.mean()),
        cosine_deviation=float(cosines.std()),
        first_direction=float(squares[-1] / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)),
    )


def _perplexity(
    states: Tensor, dictionary: Dictionary, log_z: Tensor, following: Tensor | None, chunk: int | None
) -> float:
    if following is None or not bool((following >= 0).any()):
        return math.nan
    at = following >= 0
    h, word = dictionary.widen(states)[at], following[at]
    logits = torch.cat(
        [
            (part.to(dictionary.atoms.device) * dictionary.columns[w.to(dictionary.atoms.device)]).sum(1)
            for part, w in zip(h.split(CHUNK), word.split(CHUNK), strict=True)
        ]
    )
    logits = logits if dictionary.transform is None else dictionary.transform(logits)
    return float((log_z[at] - logits.double().cpu()).mean().exp())


def _refuse_memory(positions: int, dictionary: Dictionary, memory: int | float | None) -> None:
    """Before states are kept that do not fit; a folded chunk and its copies are small beside them."""
    size = positions * dictionary.atoms.shape[1] * dictionary.atoms.element_size()
    if size > 2**28:
        allowed = bytes_of.budget(memory, torch.device("cpu"))
        bytes_of.require(size, allowed, f"states of {positions} positions", "pass fewer positions=, or more memory=")


def _refuse_shapes(states: Tensor, atoms: Tensor, bias: Tensor | None, following: Tensor | None) -> None:
    if states.dim() != 2 or atoms.dim() != 2 or states.shape[1] != atoms.shape[1]:
        given = f"states of shape {tuple(states.shape)} and atoms of shape {tuple(atoms.shape)}"
        raise InputError(describe(given, "[positions, d] and [words, d]", "use states.flatten(0, -2), atoms as rows"))
    for name, part, length in (("bias", bias, len(atoms)), ("following", following, len(states))):
        if part is not None and part.shape != (length,):
            raise InputError(describe(f"{name} of shape {tuple(part.shape)}", f"[{length}]", "correct it"))
    if following is not None and int(following.max()) >= len(atoms):
        given = f"following words up to {int(following.max())} of {len(atoms)}"
        raise InputError(describe(given, f"at most {len(atoms) - 1}, or −1 for none", "correct them"))


def _refuse(states: Tensor, dictionary: Dictionary, n_anchors: int) -> None:
    if not bool(states.isfinite().all()):
        given = "states that are not finite"
        raise InputError(describe(given, "numbers", "look for NaN in the model's weights, or in half precision"))
    width = dictionary.columns.shape[1]
    if n_anchors < 1:
        raise InputError(describe(f"n_anchors={n_anchors}", "an integer ≥ 1", "pass 1 or 2"))
    if len(states) < 2 * (width + 2) * n_anchors:
        given = f"{len(states)} positions for {n_anchors} × {width} unknowns"
        least = 2 * (width + 2) * n_anchors
        raise InputError(describe(given, f"at least {least}, as half of them are the test", "give more text"))

"""An estimate waits for the device at its end, and for what was queued before a forward: never in between.

On a CPU nothing can be waited for, so the operations that would wait on a GPU are counted, and `Readback`, which waits
for what came before it alone, is watched.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import layerwise as lw
from layerwise.curvature import estimate
from layerwise.foundations.device import Readback

WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "item",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave.Tensor",
)


class Watch(TorchDispatchMode):
    """Counts operations whose result the host must know."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.forwards, self.ended = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name.removesuffix(".default") in WAITING:
            self.waits[name] += 1
        if name.startswith(("index.Tensor", "index_put")) and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            self.waits["a boolean index"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    ask, read, divide, tolist = Readback.__init__, Readback.read, estimate._divide, Tensor.tolist
    reading = [False]

    def noted(self: Readback, values: Tensor) -> None:
        ask(self, values)
        self.forwards = watch.forwards  # type: ignore[attr-defined]

    def looked(self: Readback) -> list:
        if self.forwards == watch.forwards and not watch.ended:  # type: ignore[attr-defined]
            watch.waits["a number, and no forward since it was asked for"] += 1
        reading[0] = True
        try:
            return read(self)
        finally:
            reading[0] = False

    def listed(self: Tensor) -> Any:
        if not reading[0]:
            watch.waits["tolist"] += 1
        return tolist(self)

    def ending(sums: Any) -> None:
        watch.ended = True
        divide(sums)

    with monkeypatch.context() as patch:
        patch.setattr(Readback, "__init__", noted)
        patch.setattr(Readback, "read", looked)
        patch.setattr(Tensor, "tolist", listed)
        patch.setattr(estimate, "_divide", ending)
        handle = model.register_forward_hook(lambda *_: setattr(watch, "forwards", watch.forwards + 1))
        with watch:
            yield watch
        handle.remove()


class Tokens(nn.Module):
    """Embeddings, norms, attention, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h + self.out(mixed.transpose(1, 2).flatten(2)))


def vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3))


X, Y = torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
IGNORED = Y.masked_fill(torch.arange(6) % 3 == 0, -100)
V, S = torch.randn(8, 5), torch.randn(4, 6, 5)
LINEAR = ["qkv", "out"]
WEIGHTED = lw.likelihoods.Categorical(weight=torch.arange(11.0), class_axis=-1)

CASES: dict[str, tuple[Any, tuple, dict[str, Any]]] = {
    "labels": (Tokens, (X, Y), {"class_axis": -1}),
    "hidden layers alone": (Tokens, (X, Y), {"class_axis": -1, "select": LINEAR}),
    "ignored labels": (Tokens, (X, IGNORED), {"class_axis": -1}),
    "a mask": (Tokens, (X, Y, IGNORED >= 0), {"class_axis": -1}),
    "class weights": (Tokens, (X, Y), {"likelihood": WEIGHTED}),
    "at the labels": (Tokens, (X, IGNORED), {"class_axis": -1, "estimator": "empirical"}),
    "several draws": (Tokens, (X, Y), {"class_axis": -1, "samples": 3}),
    "diagonal": (Tokens, (X, Y), {"class_axis": -1, "select": LINEAR, "structure": "diag"}),
    "vectors": (vectors, (V, torch.randint(3, (8,))), {}),
    "real targets": (vectors, (V, torch.randn(8, 3)), {"likelihood": "gaussian"}),
    "masked real targets": (vectors, (S, torch.randn(4, 6, 3), IGNORED >= 0), {"likelihood": "gaussian"}),
    "masked binary targets": (vectors, (S, torch.rand(4, 6, 3), IGNORED >= 0), {"likelihood": "bernoulli"}),
    "binary targets": (vectors, (V, torch.rand(8, 3)), {"likelihood": "bernoulli"}),
}


@pytest.mark.parametrize("case", CASES)
def test_nobody_waits_in_the_middle(case: str, monkeypatch: pytest.MonkeyPatch):
    make, batch, options = CASES[case]
    model = make()
    model.register_forward_hook(lambda *_: None)  # as many hooks as when it is watched: those are looked at, too
    lw.fisher(model, batch, **options)  # examines the model
    model._forward_hooks.clear()
    with watched(model, monkeypatch) as watch:
        lw.fisher(model, batch, **options)
    assert watch.ended
    assert watch.forwards == 1
    assert not watch.waits


def test_a_second_batch_waits_for_the_first_alone(monkeypatch: pytest.MonkeyPatch):
    """The check of the first output goes with what is asked before the second forward."""
    model = vectors()
    batches = [(V, torch.randint(3, (8,))), (2 * V, torch.randint(3, (8,)))]
    model.register_forward_hook(lambda *_: None)
    lw.fisher(model, batches)
    model._forward_hooks.clear()
    with watched(model, monkeypatch) as watch:
        lw.fisher(model, batches)
    assert watch.forwards == 2
    assert not watch.waits


def test_the_watch_sees_waiting(monkeypatch: pytest.MonkeyPatch):
    with watched(vectors(), monkeypatch) as watch:
        bool((V > 0).any())
        V[V[:, 0] > 0]
        V.tolist()
    assert set(watch.waits) - {"nonzero.default"} == {"_local_scalar_dense.default", "a boolean index", "tolist"}


@pytest.mark.parametrize("normalize", ["examples", "terms"])
def test_ignored_labels_count_as_rows_left_out(normalize: str):
    """What is masked with zeros on the device is what would be left out by an index."""
    torch.manual_seed(0)
    model = nn.Linear(5, 11)
    x = torch.randn(4, 6, 5)
    F = lw.fisher(model, (x, IGNORED), estimator="empirical", class_axis=-1, normalize=normalize)
    keep = IGNORED >= 0
    rows = nn.functional.pad(x, (0, 1), value=1.0)[keep]
    g = model(x).softmax(-1)[keep] - nn.functional.one_hot(IGNORED[keep], 11)
    count = 4 if normalize == "examples" else int(keep.sum())
    A, G = F.operators["Linear"].A.values[0], F.operators["Linear"].G[0]
    torch.testing.assert_close(A, rows.mT @ rows / len(rows))
    torch.testing.assert_close(G, (g.mT @ g / count).detach())

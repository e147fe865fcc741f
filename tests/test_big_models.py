"""Big models: streaming with a progress bar, parts that fit in memory, needs known beforehand, merging, files."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise as lw
from layerwise.foundations.errors import MemoryBudgetError

STRUCTURES = ("kfac", "ekfac", "diag", "block", "quasidiag", "dense", "lowrank")


class Count:
    """A progress bar that counts."""

    def __init__(self) -> None:
        self.tracked: list[tuple[str, int | None, int]] = []

    def track(self, items: Iterable[Any], description: str = "", total: int | None = None) -> Iterator[Any]:
        seen = 0
        for item in items:
            yield item
            seen += 1
        self.tracked.append((description, total, seen))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def _data(n: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 1, 4, dtype=torch.float64), torch.randint(3, (n,))


def _close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a.to_dense(), b.to_dense(), rtol=1e-10, atol=1e-12)


# --- streaming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_of_any_size_give_the_same(structure: str):
    model, (x, y) = _model().double(), _data()
    whole = lw.fisher(model, (x, y), structure=structure, estimator="exact")
    parts = [(x[:1], y[:1]), (x[1:6], y[1:6]), (x[6:], y[6:])]
    _close(lw.fisher(model, parts, structure=structure, estimator="exact"), whole)


def test_a_generator_is_enough_where_one_pass_is():
    model, (x, y) = _model().double(), _data()
    for structure in ("kfac", "diag", "block", "dense", "lowrank"):
        stream = ((x[i : i + 4], y[i : i + 4]) for i in range(0, 12, 4))
        _close(
            lw.fisher(model, stream, structure=structure, estimator="exact"),
            lw.fisher(model, (x, y), structure=structure, estimator="exact"),
        )


def test_progress_is_told_of_every_batch_of_every_pass():
    model, (x, y) = _model().double(), _data()
    batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 12, 4)]
    bar = Count()
    lw.fisher(model, batches, structure="ekfac", progress=bar)
    assert [(total, seen) for _, total, seen in bar.tracked] == [(3, 3), (3, 3)]
    assert all("ekfac" in description for description, _, _ in bar.tracked)
    bar = Count()
    lw.fisher(model, iter(batches), structure="diag", progress=bar)
    assert [(total, seen) for _, total, seen in bar.tracked] == [(None, 3)]


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag", "lowrank"])
@pytest.mark.parametrize("estimator", ["exact", "empirical"])
def test_parts_that_fit_in_memory_give_the_same(structure: str, estimator: str):
    model, batch = _model().double(), _data(40)
    sizes: list[int] = []
    model[0].register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    free = lw.fisher(model, batch, structure=structure, estimator=estimator)
    assert max(sizes) == 40
    sizes.clear()
    memory = 400_000 if structure == "lowrank" else 20_000
    _close(lw.fisher(model, batch, structure=structure, estimator=estimator, memory=memory), free)
    assert max(sizes) < 40 or structure == "lowrank"


def _refuses(words: tuple[str, ...], **options: Any) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 10))
    ran = []
    model[0].register_forward_hook(lambda module, args, out: ran.append(len(args[0])))
    with pytest.raises(MemoryBudgetError, match=r"Got .* needs .*\. Expected at most .*\. ") as caught:
        lw.fisher(model, (torch.randn(64, 300), torch.randint(10, (64,))), **options)
    for word in words:
        assert word in str(caught.value)
    assert 64 not in ran  # refused before the data was gone over


def test_what_would_not_fit_is_refused_with_its_size_and_what_to_use_instead():
    _refuses(("93310 parameters", "64.9 GiB", '"kfac"', '"implicit"'), structure="dense", memory=2**30)
    _refuses(("93310 parameters", "layer '0'", "GiB", '"kfac"', '"diag"'), structure="block", memory=2**30)
    _refuses(("layer '0'", "KiB", "memory="), structure="kfac", memory=100_000)
    _refuses(("'0'", '"diag"'), structure={"0": "block", "*": "kfac"}, memory=2**30)


def test_the_default_budget_refuses_too():
    """93310² numbers are more than any machine of these tests has free."""
    _refuses(("GiB", '"kfac"'), structure="dense")


def test_rows_that_become_too_many_are_refused_on_the_way():
    model = nn.Linear(100, 10)
    batches = ((torch.randn(20, 100), torch.randint(10, (20,))) for _ in range(100))
    with pytest.raises(MemoryBudgetError, match=r"rows so far.*\"sampled\""):
        lw.fisher(model, batches, structure="lowrank", estimator="exact", memory=2_000_000)


def test_dense_results_of_other_structures_are_refused():
    model = nn.Linear(100, 100)
    matrix = lw.fisher(model, (torch.randn(8, 100), torch.randint(100, (8,))), memory=10_000_000)
    for ask in (matrix.to_dense, matrix.eigh):
        with pytest.raises(MemoryBudgetError, match=r"10100 × 10100.*389\.\d MiB.*structure=\"kfac\""):
            ask()
    assert matrix.eigh(k=2)[1].shape == (10100, 2)


def test_a_hessian_that_would_not_fit_is_refused():
    model = nn.Linear(100, 100)
    batch = torch.randn(8, 100), torch.randint(100, (8,))
    for structure in ("dense", "block"):
        with pytest.raises(MemoryBudgetError, match=r"Got .*\. Expected .*\. Use structure="):
            lw.hessian(model, batch, loss=F.cross_entropy, structure=structure, memory=10_000_000)


# --- merging -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ["examples", "terms"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_two_estimates_merge_to_that_of_all_the_data(structure: str, normalize: str):
    model, (x, y) = _model().double(), _data()
    y[3:5] = -100
    options: dict[str, Any] = {
        "structure": structure,
        "estimator": "exact",
        "normalize": normalize,
        "weight": torch.tensor([1.0, 2.0, 0.5]),
    }
    first, second = (lw.fisher(model, (x[s], y[s]), **options) for s in (slice(5), slice(5, 12)))
    merged, whole = first.merge(second), lw.fisher(model, (x, y), **options)
    if structure == "ekfac":  # two eigenbases: a weighted sum, whose trace is that of the whole
        torch.testing.assert_close(merged.trace(), whole.trace())
        return
    _close(merged, whole)
    assert merged.examples == pytest.approx(whole.examples)


def test_merging_after_a_file(tmp_path: Path):
    model, (x, y) = _model().double(), _data()
    for structure in ("kfac", "dense", "lowrank"):
        first, second = (
            lw.fisher(model, (x[s], y[s]), structure=structure, estimator="exact") for s in (slice(5), slice(5, 12))
        )
        first.save(tmp_path / structure)
        merged = lw.load(tmp_path / structure).merge(second)
        _close(merged, lw.fisher(model, (x, y), structure=structure, estimator="exact"))


def test_a_second_save_replaces_the_first(tmp_path: Path):
    model, (x, y) = _model().double(), _data()
    path = tmp_path / "F.safetensors"
    lw.fisher(model, (x, y), structure="kfac").save(path)
    lw.fisher(model, (x, y), structure="diag").save(str(path))
    assert lw.load(str(path)).structure == "diag"
    assert list(tmp_path.iterdir()) == [path]

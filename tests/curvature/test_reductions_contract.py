"""However the data is cut into batches and the work into pieces, the numbers are the same."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import close
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import layerwise as lw
from layerwise.curvature import build
from layerwise.foundations.errors import InputError, MemoryBudgetError
from layerwise.layers.capture import source
from layerwise.layers.capture.recorder import ModelRecorder

STRUCTURES = ("dense", "block", "diag", "quasidiag", "kfac", "ekfac", "lowrank", "implicit", "mixed")
N = 11


def _make(kind: str = "images") -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if kind == "tokens":
        model: nn.Module = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 4)).double()
        y = torch.randint(4, (N, 3))
        return model, torch.randint(5, (N, 3)), y.masked_fill(torch.rand(N, 3) < 0.3, -100)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4), nn.LayerNorm(4)).double()
    return model, torch.randn(N, 2, 4).double(), torch.randint(4, (N,))


def _fisher(model: nn.Module, data: Any, structure: str, **options: Any) -> Any:
    chosen: Any = {"0": "kfac", "*": "diag"} if structure == "mixed" else structure
    return lw.fisher(model, data, structure=chosen, **{"estimator": "exact", **options})


def _batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize("kind", ["images", "tokens"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.usefixtures("untyped")
def test_batches_add_up_to_the_whole_contract(structure: str, kind: str):
    """Even and uneven batches, a last one of a single example, and a `DataLoader`."""
    model, x, y = _make(kind)
    for estimator in ("exact", "empirical"):
        for normalize in ("examples", "terms"):
            options = {"estimator": estimator, "normalize": normalize}
            whole = _fisher(model, (x, y), structure, **options).to_dense()
            size = 5 if normalize == "terms" else 4  # a single example is left over, or three
            close(_fisher(model, _batches(x, y, size), structure, **options).to_dense(), whole)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    close(_fisher(model, loader, structure, estimator="empirical").to_dense(), whole * _terms_per_example(y))


def _terms_per_example(y: Tensor) -> float:
    return float((y != -100).sum()) / N


@pytest.mark.parametrize("structure", ["dense", "block", "diag", "implicit"])
def test_batches_of_a_hessian_add_up_contract(structure: str):
    model, x, y = _make()

    def hessian(data: Any) -> Tensor:
        return lw.hessian(model, data, loss=F.cross_entropy, structure=structure).to_dense()

    close(hessian(_batches(x, y, 4)), hessian((x, y)))
    summed = lw.hessian(model, _batches(x, y, 4), loss=nn.CrossEntropyLoss(reduction="sum"), structure="dense")
    close(summed.to_dense(), lw.hessian(model, (x, y), loss=F.cross_entropy, structure="dense").to_dense())


@pytest.mark.parametrize("structure", ["dense", "block", "diag", "lowrank", "implicit"])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.usefixtures("untyped")
def test_batches_of_a_moment_add_up_contract(structure: str, centered: bool):
    """The mean gradient is that of all the data, not that of each batch."""
    model, x, y = _make()

    def moment(data: Any) -> Tensor:
        options: Any = {"loss": F.cross_entropy, "structure": structure, "centered": centered}
        return lw.gradient_moment(model, data, **options).to_dense()

    close(moment(_batches(x, y, 4)), moment((x, y)))


# --- merging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["images", "tokens"])
@pytest.mark.parametrize("structure", ["dense", "block", "diag", "quasidiag", "kfac", "lowrank", "mixed"])
@pytest.mark.usefixtures("untyped")
def test_two_estimates_merge_into_the_joint_one_contract(structure: str, kind: str):
    model, x, y = _make(kind)
    first, second = (_fisher(model, (x[s], y[s]), structure) for s in (slice(4), slice(4, N)))
    merged, joint = first.merge(second), _fisher(model, (x, y), structure)
    close(merged.to_dense(), joint.to_dense())
    assert merged.structure == joint.structure
    assert merged.examples == N
    if structure == "kfac":
        for name, operator in merged.operators.items():
            for key, tensor in operator.tensors().items():
                close(tensor, joint.operators[name].tensors()[key])
    again = merged.merge(first)  # merged estimates keep what is needed to merge again
    twice = _fisher(model, [(x, y), (x[:4], y[:4])], structure)
    close(again.to_dense(), twice.to_dense())


def test_ekfac_estimates_merge_into_a_weighted_sum_contract():
    model, x, y = _make()
    first, second = (_fisher(model, (x[s], y[s]), "ekfac") for s in (slice(4), slice(4, N)))
    merged = first.merge(second)
    v = lw.ParamVector.randn(model, generator=0)
    expected = (4 * (first @ v) + (N - 4) * (second @ v)) / N
    close((merged @ v).flat(), expected.flat())
    close(merged.trace(), _fisher(model, (x, y), "ekfac").trace())


def test_different_structures_do_not_merge_contract():
    model, x, y = _make()
    with pytest.raises(InputError, match="Estimate both alike"):
        _fisher(model, (x, y), "kfac").merge(_fisher(model, (x, y), "diag"))
    a = _fisher(model, (x, y), "diag")
    with pytest.raises(InputError, match="mean over examples"):
        (a + a).merge(a)


# --- memory -----------------------------------------------------------------------------------------------


def _count_forwards(model: nn.Module) -> tuple[list[int], Any]:
    sizes: list[int] = []
    return sizes, model.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))


MEMORY = {"dense": 70_000, "block": 70_000, "ekfac": 40_000, "lowrank": 250_000, "kfac": 20_000, "mixed": 20_000}
"""Bytes in which the structure fits, but not all examples at once; 6,000 for the others."""


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("estimator", ["exact", "empirical", "sampled"])
@pytest.mark.usefixtures("untyped")
def test_little_memory_means_micro_batches_and_the_same_numbers_contract(structure: str, estimator: str):
    if (structure, estimator) == ("lowrank", "exact"):
        pytest.skip("all rows take more than all activations")
    model, x, y = _make()
    memory = MEMORY.get(structure, 6_000)
    times = 20 if memory > 20_000 else 4
    x, y = x.repeat_interleave(times, 0) + torch.randn(times * N, 2, 4).double(), y.repeat_interleave(times)
    options = {"estimator": estimator, "samples": 1 if structure == "lowrank" else 3}
    v = lw.ParamVector.randn(model, generator=0)
    expected = _fisher(model, (x, y), structure, **options) @ v
    sizes, handle = _count_forwards(model)
    found = _fisher(model, (x, y), structure, memory=memory, **options) @ v
    handle.remove()
    assert len(sizes) > 2
    assert min(sizes) < len(x)
    close(found.flat(), expected.flat())


def test_cotangents_one_at_a_time_contract(monkeypatch: pytest.MonkeyPatch):
    model, x, y = _make("tokens")
    expected = {s: _fisher(model, (x, y), s) for s in STRUCTURES}
    monkeypatch.setattr(source, "COTANGENT_BYTES", 1)
    for structure, F_ in expected.items():
        close(_fisher(model, (x, y), structure).to_dense(), F_.to_dense())


@pytest.mark.parametrize("kind", ["images", "tokens"])
@pytest.mark.usefixtures("untyped")
def test_examples_one_at_a_time_contract(monkeypatch: pytest.MonkeyPatch, kind: str):
    """Standard forms are made for one example at a time where scratch is short."""
    model, x, y = _make(kind)
    options = [{"sharing": "expand"}, {"sharing": "reduce"}, {"conv": "sua"}]
    expected = [{s: _fisher(model, (x, y), s, **o) for s in STRUCTURES} for o in options]
    monkeypatch.setattr(build, "ModelRecorder", functools.partial(ModelRecorder, chunk_bytes=1))
    for chosen, matrices in zip(options, expected, strict=True):
        for structure, F_ in matrices.items():
            found = _fisher(model, (x, y), structure, **chosen)
            if structure == "ekfac":  # where factors are singular, the basis is not unique
                close(found.trace(), F_.trace())
            else:
                close(found.to_dense(), F_.to_dense())


@pytest.mark.parametrize("structure", ["dense", "block", "lowrank"])
def test_what_does_not_fit_is_refused_by_size_and_with_an_alternative_contract(structure: str):
    model, x, y = _make()
    d = sum(p.numel() for p in model.parameters())
    with pytest.raises(MemoryBudgetError) as refused:
        _fisher(model, (x, y), structure, memory=9_000)
    message = str(refused.value)
    assert structure in message
    assert "KiB" in message
    assert "memory=" in message
    if structure != "lowrank":
        assert str(d) in message
        assert 'structure="kfac"' in message
    else:
        assert 'structure="implicit"' in message


def test_a_dense_matrix_that_does_not_fit_is_refused_contract():
    model, x, y = _make()
    for structure in ("diag", "kfac", "implicit"):
        F_ = _fisher(model, (x, y), structure, memory=20_000)
        with pytest.raises(MemoryBudgetError, match="dense matrix of 63 × 63"):
            F_.to_dense()


# --- data that cannot be gone over twice ------------------------------------------------------------------


def test_a_generator_serves_one_pass_contract():
    model, x, y = _make()
    whole = _fisher(model, (x, y), "kfac")
    close(_fisher(model, (b for b in _batches(x, y, 4)), "kfac").to_dense(), whole.to_dense())
    with pytest.raises(InputError, match="iterated 2 times"):
        _fisher(model, (b for b in _batches(x, y, 4)), "ekfac")


class _Shuffled:
    """Batches in another order at every pass."""

    def __init__(self, batches: list) -> None:
        self.batches = batches

    def __iter__(self):
        self.batches = self.batches[1:] + self.batches[:1]
        return iter(self.batches)


def test_a_loader_that_changes_between_passes_is_refused_contract():
    model, x, y = _make()
    with pytest.raises(InputError, match="shuffle=False"):
        _fisher(model, _Shuffled(_batches(x, y, 4)), "ekfac")

"""Two gloo processes equal one process on the joined batch, and each other bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.distributed.processes import Processes

sys.path.insert(0, str(Path(__file__).parent))
from two_processes import RUNS, train

HERE = Path(__file__).parent
gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed has no gloo here"
)
NOT_UNIQUE = ("SOAP", "KFAC sampled", *(name for name in RUNS if "padded" in name))
"""SOAP's first basis is that of a singular matrix; labels are drawn by each process for itself."""


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor | str]]:
    """Of both processes, what the tests ask for that are run."""
    folder = tmp_path_factory.mktemp("ranks")
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = sorted({item.callspec.params["name"] for item in here if "ranks" in item.fixturenames})  # pyright: ignore
    command = [sys.executable, "-W", "ignore", str(HERE / "two_processes.py"), str(folder), *asked]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def of(ranks: list[dict[str, Tensor | str]], name: str) -> tuple[Tensor, Tensor]:
    missing = next((v for found in ranks for v in found.values() if isinstance(v, str)), None)
    first, second = (found.get(name, f"not run after {missing}") for found in ranks)
    assert isinstance(first, Tensor), first
    assert isinstance(second, Tensor), second
    return first, second


@gloo
@pytest.mark.parametrize("name", RUNS)
def test_ranks_are_identical(name: str, ranks: list[dict[str, Tensor | str]]):
    first, second = of(ranks, name)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()


@gloo
@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", [name for name in RUNS if name not in NOT_UNIQUE])
def test_two_processes_equal_one_on_the_joined_batch(name: str, ranks: list[dict[str, Tensor | str]]):
    assert (of(ranks, name)[0] - train(name, None, False)).abs().max() < 1e-6


# --- one process ------------------------------------------------------------------------------------------


class Pretended(Processes):
    """So many ranks, for what needs no communication."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.ranks = count

    @property
    def count(self) -> int:
        return self.ranks


def test_one_process_leaves_everything_as_it_is():
    alone = Processes()
    tensors = [torch.randn(3), torch.randn(2, 2, dtype=torch.float64)]
    assert (alone.count, alone.rank) == (1, 0)
    assert all(a is b for a, b in zip(alone.add_up(tensors), tensors, strict=True))
    alone.share([(0, tensors[0])])
    assert alone.owners([3.0, 1.0]) == [0, 0]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_owners_are_balanced_by_cost(count: int):
    """The dearest first, to whoever has least: no rank has more than the mean and the dearest piece."""
    sizes = torch.randint(1, 100, (40,), generator=torch.Generator().manual_seed(count)).double()
    costs = (sizes**3).tolist()
    owner = Pretended(count).owners(costs)
    load = [sum(c for c, o in zip(costs, owner, strict=True) if o == rank) for rank in range(count)]
    assert set(owner) == set(range(count))
    assert max(load) <= sum(costs) / count + max(costs)
    assert max(load) - min(load) <= max(costs)
    assert owner == Pretended(count).owners(costs)


def test_equal_pieces_are_dealt_in_turn():
    assert Pretended(3).owners([1.0] * 6) == [0, 1, 2, 0, 1, 2]
    assert Pretended(2).owners([]) == []

"""Sharded training (`fully_shard`) equals training in one process on the joined batch, for every member."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from sharded_training import MEMBERS, MODELS, Case, train, whole

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed has no gloo here"
    ),
    pytest.mark.usefixtures("untyped"),
]
TOLERANCE = 1e-10
ORDER_OF_SUMS = ("SOAP", "transformer")
"""A gradient of 13 × 6 leaves its first factor P a null space of seven directions. Rounding chooses their basis, and
Adam in another basis takes other steps: one process that adds gradients up in the order of two ranks is 6e-7 off one
that does not, and 2e-15 off the two. Of more ranks gloo has its own order."""
NOT_UNIQUE = 1e-5
FLOAT32 = {"as AdamW": 1e-5, "formula": 1e-3}
"""Of twenty steps in float32, for updates of AdamW's size and of single entries, and for the bare formula (and SOAP),
whose step is as large as inverses say. Beside one process in float64, one in float32 is as far off."""
AS_ADAMW = ("SGD", "SGD clipped", "Adam", "Sign", "KFAC adam", "EKFAC adam", "FOOF adam", "Shampoo adam", "Muon adam")

SHORT = {
    2: [
        Case("KFAC adam", steps=8),
        Case("SOAP", steps=8),
        Case("Muon adam", steps=4, how={"accumulate": 3}),
    ],
}
"""By number of processes, of which each start takes seconds."""
FEW = ("KFAC", "SOAP", "Muon adam", "Adam")
"""One of each kind: statistics of layers, of gradients, directions without statistics, single entries."""
LONG = {  # with four processes, layers of 7, 5 and 3 outputs have uneven and empty shards
    2: [
        *(Case(member, "transformer") for member in MEMBERS),
        *(Case(member, how={"dtype": "float32"}) for member in MEMBERS if member != "NGD"),
    ],
    4: [
        *(Case(member, model) for model in ("mlp", "cnn", "transformer") for member in MEMBERS),
        *(Case(member, shape=(2, 2)) for member in MEMBERS),
        *(Case(member, "transformer", (2, 2)) for member in FEW),
        *(Case(member, "checkpointed") for member in ("KFAC", "EKFAC", "KFAC exact")),
        *(Case(member, how={"accumulate": 3}) for member in ("KFAC", "EKFAC", "SOAP", "Adam")),
        *(Case(member, how={"unused": ("0.weight", "0.bias", "6.bias")}) for member in MEMBERS),
        *(Case(member, how={"frozen": ("0.weight", "2.bias")}) for member in MEMBERS),
    ],
}
"""Every member with every kind of layer and every mesh, each once. Not all of their products: two ranks divide as four
do, with fewer odd shards; what copies do (2 × 2) and which type is sent do not depend on the kind of layer."""


def of_processes(world: int, cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """What each of several processes found; started anew, without this one's checks of types."""
    torch.save([vars(case) for case in cases], folder / "cases.pt")
    command = [sys.executable, "-W", "ignore", str(HERE / "sharded_training.py"), str(world), str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module")
def alone() -> Callable[[Case, int], Tensor]:
    """One process on the joined batch; once for all meshes that are compared with it."""
    known: dict[tuple[str, str, int, str, int], Tensor] = {}

    def parameters(case: Case, summed_as: int) -> Tensor:
        key = (case.member, case.model, case.steps, str(case.how), summed_as)
        if key not in known:
            known[key] = train(case, summed_as=summed_as)
        return known[key]

    return parameters


def assert_equals_one_process(case: Case, ranks: list[dict[str, Any]], alone: Callable[[Case, int], Tensor]) -> None:
    found = [rank.get(case.name, "not run: an earlier case failed") for rank in ranks]
    for got in found:
        assert isinstance(got, Tensor), got
        assert torch.equal(got, found[0])
    not_unique = (case.member, case.model) == ORDER_OF_SUMS
    expected = alone(case, 2 if not_unique and len(ranks) == 2 else 1)
    tolerance = NOT_UNIQUE if not_unique and len(ranks) > 2 else TOLERANCE
    if "dtype" in case.how:
        tolerance = FLOAT32["as AdamW" if case.member in AS_ADAMW else "formula"]
    assert float((found[0] - expected).abs().max()) < tolerance
    assert float((expected - whole(MODELS[case.model][0]())).abs().max()) > 1e-3


def each(cases: dict[int, list[Case]]) -> list[Any]:
    pairs = [(world, case) for world, of_world in cases.items() for case in of_world]
    return [pytest.param(world, case, id=f"{world} {case.name}") for world, case in pairs]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """All cases that the selected tests ask for, in one start of the processes for each number of them."""
    asked: dict[int, dict[str, Case]] = {}
    for item in request.session.items:
        if item.path == request.path and "trained" in getattr(item, "fixturenames", ()):
            params = item.callspec.params  # type: ignore[attr-defined]
            asked.setdefault(params["world"], {})[params["case"].name] = params["case"]
    folder = tmp_path_factory.mktemp
    return {n: of_processes(n, list(cases.values()), folder(f"ranks{n}")) for n, cases in asked.items()}


@pytest.mark.parametrize(("world", "case"), each(SHORT))
def test_sharded_training_equals_one_process(
    world: int, case: Case, trained: dict[int, Any], alone: Callable[[Case, int], Tensor]
):
    assert_equals_one_process(case, trained[world], alone)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), each(LONG))
def test_every_member_equals_one_process(
    world: int, case: Case, trained: dict[int, Any], alone: Callable[[Case, int], Tensor]
):
    assert_equals_one_process(case, trained[world], alone)

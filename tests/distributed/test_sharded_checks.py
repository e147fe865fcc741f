"""Of sharded training: what is sent and kept, what is saved and loaded, what goes wrong."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from sharded_checks import MEMBERS_SAVED, tensor_parallel_cases
from sharded_training import MODELS, loss_of, whole

import layerwise as lw

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed has no gloo here"
    ),
    pytest.mark.usefixtures("untyped"),
    pytest.mark.slow,
    pytest.mark.distributed,
]
CONSTANT = 4096
"""Bytes of state that a rank may have beyond its share: what the largest layer of these small models is."""


def check(world: int, folder: Path, *names: str) -> list[dict[str, Any]]:
    """What each of several processes found out."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", str(HERE / "sharded_checks.py"), str(world), str(folder), *names]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = [torch.load(file, weights_only=True) for file in sorted(folder.glob("*.pt"))]
    for rank in found:
        for name in names:
            if name != "another_plan":
                assert not isinstance(rank[name], str), rank[name]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two processes."""
    names = (
        "traffic",
        "state",
        "repeated",
        "odd",
        "idle_step",
        "full_state",
        "tensor_parallel",
        "decided_alike",
        "asynchronous",
        "offloaded",
        "another_plan",
    )
    return check(2, tmp_path_factory.mktemp("two"), *names)


# --- what is sent and kept --------------------------------------------------------------------------------


def test_collectives_of_a_step_do_not_grow_with_the_layers(two: list[dict[str, Any]]):
    for rank in two:
        found = rank["traffic"]
        for member, most in (("KFAC adam", 5), ("EKFAC adam", 7), ("Muon adam", 3)):
            shallow, deep = found[f"{member} 2"], found[f"{member} 6"]
            assert shallow["calls"] == deep["calls"]
            assert deep["layers"] > 2 * shallow["layers"]
            assert sum(deep["calls"].values()) <= most
            assert set(deep["calls"]) == {"all_reduce", "all_to_all_single"}


def test_bytes_sent_are_those_of_the_plan(two: list[dict[str, Any]]):
    for rank in two:
        for found in rank["traffic"].values():
            assert found["bytes"] == found["planned"] > 0


def test_state_is_divided_among_the_ranks(two: list[dict[str, Any]]):
    for member, of_first in two[0]["state"].items():
        for rank in two:
            assert rank["state"][member]["here"] <= 1.15 * of_first["single"] / 2 + CONSTANT, member
        assert sum(rank["state"][member]["here"] for rank in two) >= 0.99 * of_first["single"]


# --- states -----------------------------------------------------------------------------------------------


def test_a_step_without_gradients_and_rate_changes_nothing(two: list[dict[str, Any]]):
    for rank in two:
        assert set(rank["idle_step"]) == set(MEMBERS_SAVED)
        assert all(rank["idle_step"].values()), rank["idle_step"]


def test_a_full_state_is_that_of_one_process(two: list[dict[str, Any]]):
    for member, make in MEMBERS_SAVED.items():
        model = MODELS["mlp"][0]()
        opt = make(model)
        for x, y in MODELS["mlp"][1](9)[:5]:
            opt.zero_grad()
            loss_of(model(x), y).backward()
            opt.step()
        alone, names = opt.state_dict(), [name for name, _ in model.named_parameters()]
        for rank in two:
            assert rank["full_state"][member]["same"]
            for place, layers in alone["state"].items():
                sharded = rank["full_state"][member]["state"][names[place]]
                for layer, state in layers.items():
                    assert set(sharded[layer]) == set(state)
                    for name, t in state.items():
                        if not name.startswith("U_") and name not in ("M", "V"):  # a basis is known up to signs
                            torch.testing.assert_close(sharded[layer][name], t.to(sharded[layer][name].dtype))


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, dict[str, torch.Tensor]]]:
    """Checkpoints that so many ranks have saved, once: their folder, and parameters at the end of the run."""
    known: dict[int, tuple[Path, dict[str, torch.Tensor]]] = {}

    def of(ranks: int) -> tuple[Path, dict[str, torch.Tensor]]:
        if ranks not in known:
            folder = tmp_path_factory.mktemp(f"by{ranks}")
            known[ranks] = folder, check(ranks, folder / "saved", "saved")[0]["saved"]
        return known[ranks]

    return of


@pytest.mark.parametrize(("saved", "loaded"), [(4, 1), (4, 3), (4, 4), (1, 2), (3, 4)])
def test_a_checkpoint_of_some_ranks_goes_on_with_others(
    saved: int, loaded: int, saved_by: Callable[[int], tuple[Path, dict[str, torch.Tensor]]]
):
    """At every phase of the refresh cycle of three: the next steps are those of the run that was not interrupted.

    A checkpoint does not know the ranks that it was saved by: each number of them saves and each loads, not all pairs.
    """
    folder, going = saved_by(saved)
    for rank in check(loaded, folder / f"loaded-{loaded}", "resumed"):
        assert len(rank["resumed"]) == (8 if loaded == 1 else 4) * len(MEMBERS_SAVED)
        for name, found in rank["resumed"].items():
            assert float((found - going[name.split()[0]]).abs().max()) < 1e-10, name


def test_steps_that_are_taken_while_a_checkpoint_is_written_are_no_part_of_it(two: list[dict[str, Any]]):
    for rank in two:
        assert set(rank["asynchronous"]) == {"KFAC", "SOAP", "Adam"}
        assert all(error < 1e-10 for error in rank["asynchronous"].values()), rank["asynchronous"]


def test_a_rank_that_is_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path):
    """The half-written one has no `.metadata`, which is written last; going on from the one before is exact."""
    killed = check(3, tmp_path / "killed", "killed_saving")
    assert len(killed) == 2
    assert all(rank["killed_saving"]["step"] == 6 for rank in killed)
    for rank in check(3, tmp_path / "restarted", "restarted"):
        found = rank["restarted"]
        assert found["last"] == 4
        assert "step-6" in found["folders"]
        assert torch.equal(found["resumed"], found["going"])


def test_parameters_on_the_host(two: list[dict[str, Any]]):
    for rank in two:
        found = dict(rank["offloaded"])
        assert "CPUOffloadPolicy" in found.pop("on another device")
        assert len(found) == 4
        assert all(found.values()), found


# --- what goes wrong, and what is odd ---------------------------------------------------------------------


def test_a_gradient_that_is_missing_on_one_rank_is_zero_there(two: list[dict[str, Any]]):
    assert all(rank["odd"]["missing"] > 0 for rank in two)


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_on_all(two: list[dict[str, Any]]):
    for rank in two:
        assert (rank["odd"]["not finite"], rank["odd"]["skipped"], rank["odd"]["finite"]) == (0.0, 1, True)


@pytest.mark.parametrize("member", ["KFAC adam", "EKFAC adam", "KFAC exact", "SOAP"])
def test_forwards_in_bfloat16(member: str, two: list[dict[str, Any]]):
    for rank in two:
        assert rank["odd"][f"half {member}"] < 0.9
        assert rank["odd"][f"half {member} type"] == "torch.float32"
        assert rank["odd"][f"half {member} statistics"] == (0 if member == "SOAP" else 4)


def test_a_model_that_is_sharded_after_its_optimizer_was_built(two: list[dict[str, Any]]):
    for rank in two:
        assert torch.equal(rank["repeated"]["later"], rank["repeated"]["at once"])


def test_what_an_optimizer_says_of_itself(two: list[dict[str, Any]]):
    shown = {rank["repeated"]["shown"] for rank in two} | {rank["repeated"]["shown before"] for rank in two}
    assert len(shown) == 1
    layers = [name for rank in two for name in rank["repeated"]["conditions"]]
    assert sorted(layers) == ["0", "2", "4", "6"]
    assert all(all(rank["repeated"]["owned"]) for rank in two)


def assert_tensor_parallel(found: dict[str, Any], *shapes: tuple[int, ...]) -> None:
    errors = {name: error for name, error in found.items() if isinstance(error, float)}
    assert len(errors) == sum(len(tensor_parallel_cases(shape)) for shape in shapes)
    for name, error in errors.items():  # SOAP: see `test_sharded.ORDER_OF_SUMS`; here 12 × 5 and 20 steps
        assert error < (1e-8 if name.startswith("SOAP") else 1e-10), name
    seen = {name: count for name, count in found.items() if name.startswith("seen ")}
    assert all(count == (3 if "sequence" in name else 5) for name, count in seen.items()), seen
    assert "examples of whole layers" in found["NGD"]
    assert "fails where tensor parallelism does not divide its activations" in found["own heads"]
    assert "tensor parallelism divides it, and it is no nn.Linear" in found["embedding"]


def test_tensor_parallelism_equals_one_process_or_is_refused(two: list[dict[str, Any]]):
    for rank in two:
        assert_tensor_parallel(rank["tensor_parallel"], (2,))


@pytest.mark.distributed
@pytest.mark.slow
def test_tensor_parallelism_under_fsdp_equals_one_process(tmp_path: Path):
    for rank in check(4, tmp_path, "tensor_parallel"):
        assert_tensor_parallel(rank["tensor_parallel"], (4,), (2, 2))


def adaptive_alone() -> tuple[torch.Tensor, list[float]]:
    """Adaptive damping in one process, on the joined batches."""
    model = MODELS["mlp"][0]()
    opt = lw.optim.KFAC(
        model,
        0.05,
        scale="formula",
        refresh_every=2,
        clip=None,
        estimator="empirical",
        damping="adaptive",
        momentum=0.0,
    )
    dampings = []
    for x, y in MODELS["mlp"][1](12):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)
        dampings.append(opt.param_groups[0]["damping"])
    return whole(model), dampings


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_adaptive_damping_is_decided_by_the_losses_of_all_ranks(kind: str, two: list[dict[str, Any]]):
    model, dampings = adaptive_alone()
    assert len({*dampings}) > 1
    for rank in two:
        assert rank["decided_alike"][f"dampings {kind}"] == pytest.approx(dampings, rel=1e-12)
        assert float((rank["decided_alike"][f"adaptive {kind}"] - model).abs().max()) < 1e-10


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
@pytest.mark.parametrize("member", ["KFAC", "EKFAC running"])
def test_ranks_with_batches_of_other_sizes_scale_alike(member: str, kind: str, two: list[dict[str, Any]]):
    """A loss that is a sum: its gradient over all examples is known from all ranks' counts together."""
    model = MODELS["mlp"][0]()
    make = lw.optim.KFAC if member == "KFAC" else partial(lw.optim.EKFAC, scaling="running", refresh_every=1)
    opt = make(model, 0.005, scale="formula", loss_average=None)
    for x, y in MODELS["mlp"][1](6):
        opt.zero_grad()
        (loss_of(model(x), y) * len(x)).backward()
        opt.step()
    for rank in two:
        assert float((rank["decided_alike"][f"uneven {member} {kind}"] - whole(model)).abs().max()) < 1e-10


def test_a_first_batch_that_is_not_finite_on_one_rank(two: list[dict[str, Any]]):
    first, second = (rank["decided_alike"] for rank in two)
    assert first["skipped"] == second["skipped"] == 1
    assert torch.equal(first["after a broken start"], second["after a broken start"])
    assert torch.isfinite(first["after a broken start"]).all()


def test_one_rank_takes_the_steps_of_a_model_that_is_not_sharded(tmp_path: Path):
    found = check(1, tmp_path, "one_rank")[0]["one_rank"]
    assert len(found) > 60
    assert all(found.values()), [name for name, same in found.items() if not same]


def test_ranks_with_different_plans_are_told_before_anything_is_sent(two: list[dict[str, Any]]):
    for rank in two:
        assert "plans that differ between ranks 0 and 1" in rank["another_plan"]
        assert "4 (1, 5, 8)" in rank["another_plan"]


def test_a_killed_rank_ends_the_others_with_phase_and_layers(tmp_path: Path):
    found = check(3, tmp_path, "killed")
    assert len(found) == 2
    for rank in found:
        assert "a failed collective in the gradients of 0.weight" in rank["killed"]["said"]
        assert rank["killed"]["after"] < 40

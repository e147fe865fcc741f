"""`accelerate`: `prepare`, gradient accumulation, checkpoints, gradient scalers; parameters swapped under FSDP2."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_training import (
    BATCH,
    CLIP,
    MEMBERS,
    SHORT,
    assert_has_moved,
    assert_same_weights,
    batch,
    data,
    loss_of,
    member,
    net,
    plain_loop,
    undrawn,
    warmup,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'layerwise[frameworks]'")

STEPS, STOP = 12, 3
HERE = Path(__file__).parent


def loop(name: str, accumulate: int = 1, save: Path | None = None, resume: Path | None = None) -> nn.Module:
    """As in the recipe."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model: Any = net()
    opt: Any = member(name)(model)
    loader: Any = DataLoader(TensorDataset(*data(STEPS)), batch_size=BATCH)
    model, opt, loader, schedule = accelerator.prepare(model, opt, loader, warmup(opt))
    start = 0
    if resume is not None:
        accelerator.load_state(str(resume))
        start, loader = STOP, accelerator.skip_first_batches(loader, STOP)
    for step, found in enumerate(loader, start=start + 1):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, found))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            opt.step()
            schedule.step()
            opt.zero_grad()
        with torch.no_grad():
            model.eval()(found[0])
            model.train()
        if save is not None and step == STOP:
            accelerator.save_state(str(save))
    accelerator.free_memory()
    return accelerator.unwrap_model(model)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in MEMBERS]
)
def test_prepared_accumulated_and_resumed(name: str, tmp_path: Path):
    """An evaluation after every step; the checkpoint is within a cycle of refreshes."""
    expected = plain_loop(member(name), STEPS)
    assert_has_moved(expected)
    assert_same_weights(loop(name, save=tmp_path), expected)
    assert_same_weights(loop(name, resume=tmp_path), expected)
    assert_same_weights(loop(name, accumulate=2), plain_loop(member(name), STEPS, accumulate=2))


def test_a_gradient_scaler_that_leaves_a_step_out():
    """Statistics of the backward that overflowed are forgotten with its gradients."""
    accelerate.Accelerator(cpu=True)  # the wrapper below asks for the state that this makes
    scaled, plain = net(), net()
    opts = [undrawn("KFAC")(model, factor_every=1) for model in (scaled, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10_000)
    wrapped = accelerate.optimizer.AcceleratedOptimizer(opts[0], scaler=scaler)
    for step in range(STEPS):
        scaler.scale(loss_of(scaled, batch(step, STEPS))).backward()
        if step == 3:
            next(scaled.parameters()).grad.fill_(float("inf"))
        scaler.unscale_(opts[0])
        nn.utils.clip_grad_norm_(scaled.parameters(), CLIP)
        wrapped.step()
        assert wrapped.step_was_skipped == (step == 3)
        wrapped.zero_grad()
        if step != 3:
            loss_of(plain, batch(step, STEPS)).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            opts[1].step()
            opts[1].zero_grad()
    assert [opt.steps_taken for opt in opts] == [STEPS - 1, STEPS - 1]
    for p, q in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By kind, the folder with the weights of all members that the selected tests ask for, and what went wrong.

    One start of two processes for each kind: it takes as long as some members.
    """
    asked: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == request.path and "trained" in getattr(item, "fixturenames", ()):
            params = item.callspec.params  # type: ignore[attr-defined]
            asked.setdefault(params["kind"], []).append(params["name"])
    return {kind: of_processes(kind, names, tmp_path_factory.mktemp(kind)) for kind, names in asked.items()}


def of_processes(kind: str, names: list[str], folder: Path) -> tuple[Path, str]:
    script = [str(HERE / "accelerated_processes.py"), kind, str(folder), *names]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    return folder, done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) == ("KFAC", "fsdp2") else pytest.mark.slow)
        for name in MEMBERS
        for kind in ("ddp", "ddp-unused", "fsdp2")
    ],
)
def test_two_processes(name: str, kind: str, trained: dict[str, tuple[Path, str]]):
    """Under FSDP2 the optimizer is built before the model is sharded, and its parameters are swapped. In float64.

    `find_unused_parameters` wraps the outputs of the forward.
    """
    folder, failed = trained[kind]
    file = folder / f"{name}.pt"
    assert file.exists(), failed
    found = torch.load(file, weights_only=True)
    expected = plain_loop(undrawn(name), STEPS, clip=None, dtype=torch.float64)
    assert_has_moved(expected)
    # Over several processes NGD solves by conjugate gradients, in one directly.
    within = {"rtol": 1e-4, "atol": 1e-5} if name == "NGD" else {"rtol": 1e-8, "atol": 1e-10}
    for got, p in zip(found, expected.parameters(), strict=True):
        torch.testing.assert_close(got, p.detach(), **within)

"""A posterior on its way, or a stack, as safetensors: where it stands, the optimizer's state, what was measured."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from layerwise.foundations.errors import FileFormatError, InputError, describe

FORMAT = "layerwise-pac-bayes"


@dataclass(frozen=True, eq=False)
class Stage:
    """What a checkpoint holds."""

    epoch: int
    """Epochs that are done."""
    tensors: Mapping[str, Tensor]
    """"theta"; "basis", the mean at which the bases were computed, and "last", the epoch; "state/…", the optimizer's.
    Of a stack "basis" and "last" have a row a run."""
    history: list[dict[str, float | int]]
    """Of a stack those of all runs, each row with the number of its "run"."""


def check_place(path: Path, every: int, names: tuple[str, str]) -> None:
    """That a file can be there, written every so many epochs; the names are those of the caller's options."""
    if every < 1:
        raise InputError(describe(f"{names[1]}={every}", "a number ≥ 1", "take e.g. 10"))
    if path.is_dir():
        raise InputError(describe(f"{names[0]}={path}, a folder", "a file", "add a name, e.g. run.safetensors"))


def optimizer_state(optimizer: torch.optim.Optimizer, theta: Tensor) -> dict[str, Tensor]:
    """As tensors of a checkpoint."""
    return {f"state/{name}": torch.as_tensor(value) for name, value in optimizer.state[theta].items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, theta: Tensor, stage: Stage) -> None:
    """Give it the state that a checkpoint has."""
    own = {name: tensor for name, tensor in stage.tensors.items() if name.startswith("state/")}
    optimizer.state[theta] = {name.removeprefix("state/"): tensor for name, tensor in own.items()}


def fingerprint(tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> str:
    """Of what decides a run: its weights and its options."""
    found = hashlib.sha256(json.dumps(dict(options), sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().double().contiguous().numpy().tobytes())
    return found.hexdigest()


def save(path: Path, run: str, stage: Stage) -> None:
    """Write it beside, then put it in its place: a kill leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in stage.tensors.items()}
    about = {"format": FORMAT, "run": run, "epoch": str(stage.epoch), "history": json.dumps(stage.history)}
    save_file(tensors, partial, metadata=about)
    os.replace(partial, path)


def load(path: Path, run: str, device: torch.device) -> Stage | None:
    """What is there, or None; a file of another run, or no checkpoint at all, is refused."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise FileFormatError(
            describe(f"{path}, which cannot be read ({error})", "a checkpoint of pac_bayes", "delete it")
        ) from error
    if about.get("format") != FORMAT or about.get("run") != run:
        given = f"{path}, which is of another model, of other data or other options"
        raise FileFormatError(describe(given, "a checkpoint of this run", "give another path, or delete it"))
    return Stage(int(about["epoch"]), tensors, json.loads(about["history"]))

"""Trainings of `bases.py` and `precision.py`: the model of the race without dropout, so that all see the same noise."""

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from layerwise.optim.engine import Layerwise
from shakespeare.model import TINY, Size, Text, cross_entropy
from shakespeare.runs import Race

SMALL = Size(2, 48, 4, 32, 16, steps=150, warm_up=15)


def parser(description: str | None) -> argparse.ArgumentParser:
    """What both are asked."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--steps", type=int, help="of each training")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--small", action="store_true", help="a model for a CPU")
    found.add_argument("--tiny", action="store_true", help="seconds, to see that all runs")
    found.add_argument("--json", type=Path, help="also write the JSON here")
    return found


def as_asked(asked: argparse.Namespace, steps: int | None = None) -> Race:
    """Model, text and length of a training; `steps`: where none are asked for, in place of the size's own."""
    size = replace(TINY if asked.tiny else SMALL if asked.small else Size(), dropout=0.0)
    size = replace(size, steps=asked.steps or steps or size.steps)
    if asked.device == "cpu":  # the GPU's code, by plain torch
        Layerwise.host_may_sync = property(lambda _: False)  # type: ignore[assignment]
    return Race(Text.load(size, asked.device, asked.tiny), size, target=0.0, limit=0.0)


def training(
    race: Race, model: nn.Module, opt: torch.optim.Optimizer, seed: int, autocast: contextlib.AbstractContextManager
) -> Iterator[tuple[int, Tensor]]:
    """Each step with its loss, once it is done."""
    rates = [float(group["lr"]) for group in opt.param_groups]
    stream = race.text.generator(seed)
    for step in range(race.size.steps):
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate * race.factor(step)
        opt.zero_grad()
        x, y = race.text.batch(stream)
        with autocast:
            loss = cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        opt.step()
        yield step, loss.detach()

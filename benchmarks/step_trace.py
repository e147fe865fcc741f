"""How much code a reader crosses: files, functions and changes of file of one call, traced on a tiny MLP.

    python benchmarks/step_trace.py                 # a table, and one JSON line
    python benchmarks/step_trace.py --of KFAC       # every function of one row, in the order of first calls

Only calls into `layerwise` count, of the third iteration, by which all that is built once has been built; statistics
and refreshes are due in it. "NAME" is `opt.step()` alone, "NAME, iteration" also the forward and backward, whose hooks
record statistics. A change of file is a call, or a return, that goes from one file to another.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import layerwise as lw

ROOT = Path(lw.__file__).parent
MEMBERS = ("SGD", "Adam", "Muon", "Shampoo", "SOAP", "FOOF", "KFAC", "EKFAC", "NGD")
EVERY_STEP = {"factor_every": 1, "refresh_every": 1}


@dataclass
class Trace:
    """What is entered while it is on."""

    functions: dict[tuple[str, str], int] = field(default_factory=dict)
    """(file, function) in the order of first calls, with the number of calls."""
    changes: int = 0
    _last: str | None = None
    _files: dict[str, str | None] = field(default_factory=dict)

    def __enter__(self) -> "Trace":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _file(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._files:
            path = Path(name)
            self._files[name] = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None
        return self._files[name]

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        file = self._file(frame)
        if file is None or event not in ("call", "return"):
            return
        if event == "call":
            place = (file, frame.f_code.co_qualname)
            self.functions[place] = self.functions.get(place, 0) + 1
        else:  # back to whoever of ours had called
            back = frame.f_back
            while back is not None and self._file(back) is None:
                back = back.f_back
            if back is None:
                return
            file = self._file(back)
        if self._last is not None and file != self._last:
            self.changes += 1
        self._last = file

    def row(self) -> dict[str, int]:
        """The three counts."""
        files = {file for file, _ in self.functions}
        return {"files": len(files), "functions": len(self.functions), "changes of file": self.changes}


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Two layers, eight examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.randn(8, 6), torch.randint(3, (8,))


def step(member: str, whole: bool) -> Callable[[], Trace]:
    """The third step of a member, or its whole iteration."""

    def traced() -> Trace:
        model, x, y = problem()
        made = getattr(lw.optim, member, None)
        if made is None:
            raise SystemExit(f"lw.optim has no {member}")
        takes = EVERY_STEP if member in ("Shampoo", "SOAP", "FOOF", "KFAC", "EKFAC") else {}
        extra = {"likelihood": "categorical"} if member in ("KFAC", "EKFAC", "NGD") else {}
        opt = made(model, lr=1e-3, **takes, **extra)

        def gradients() -> None:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()

        for _ in range(2):
            gradients()
            opt.step()
        if not whole:
            gradients()
        with Trace() as trace:
            if whole:
                gradients()
            opt.step()
        return trace

    return traced


def fisher() -> Trace:
    """The second call of `lw.fisher`."""
    model, x, y = problem()
    lw.fisher(model, (x, y), structure="kfac")
    with Trace() as trace:
        lw.fisher(model, (x, y), structure="kfac")
    return trace


def main() -> None:
    """Print the table, or one row's functions."""
    rows: dict[str, Callable[[], Trace]] = {
        f"{member}{', iteration' if whole else ''}": step(member, whole)
        for whole in (False, True)
        for member in MEMBERS
    }
    rows["fisher(kfac)"] = fisher
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=list(rows), help="list the functions of this row")
    options = parser.parse_args()
    if options.of:
        for (file, function), calls in rows[options.of]().functions.items():
            print(f"{calls:>5}  {file}  {function}")
        return
    found = {name: run().row() for name, run in rows.items()}
    print(f"{'':<20}{'files':>8}{'functions':>12}{'changes of file':>18}")
    for name, row in found.items():
        print(f"{name:<20}{row['files']:>8}{row['functions']:>12}{row['changes of file']:>18}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

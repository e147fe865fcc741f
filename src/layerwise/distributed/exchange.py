"""`Exchange`: pieces of many tensors from many ranks to many others, packed into one all-to-all."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.distributed.processes import Processes
from layerwise.foundations.errors import LayerwiseError, describe


@dataclass(frozen=True)
class Piece:
    """Entries of one tensor that go from this rank to another, or come from there."""

    key: str
    """Which tensor: the name of a parameter or of a layer."""
    rank: int
    """Where it goes to, or comes from."""
    count: int


@dataclass
class Traffic:
    """What was sent since the optimizer was built; tests compare it with the plan."""

    collectives: int = 0
    bytes_sent: int = 0
    """To other ranks."""
    by_phase: dict[str, int] = field(default_factory=dict)
    """Collectives by what they were for."""

    def count(self, phase: str, sent: int) -> None:
        """Add one collective."""
        self.collectives += 1
        self.bytes_sent += sent
        self.by_phase[phase] = self.by_phase.get(phase, 0) + 1


@dataclass(frozen=True)
class Exchange:
    """A pattern of pieces that all ranks know: each sends what the others expect, in one order for a pair of ranks."""

    phase: str
    """What is sent, for messages."""
    sends: Sequence[Piece]
    receives: Sequence[Piece]
    processes: Processes
    traffic: Traffic

    def run(
        self, give: Callable[[Piece], Tensor], dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Piece, Tensor]]:
        """Send ``give(piece)``, flattened; returns what came, flat, in the order of `receives` by rank."""
        count, rank = self.processes.count, self.processes.rank
        outgoing, incoming = _by_rank(self.sends, count), _by_rank(self.receives, count)
        packed = [give(piece).reshape(-1).to(dtype) for pieces in outgoing for piece in pieces]
        flat = torch.cat(packed) if packed else torch.empty(0, dtype=dtype, device=device)
        if count == 1:
            came = flat
        else:
            lengths = [[sum(piece.count for piece in pieces) for pieces in side] for side in (incoming, outgoing)]
            came = torch.empty(sum(lengths[0]), dtype=dtype, device=device)
            with named_failure(self.phase, (piece.key for piece in (*self.sends, *self.receives))):
                dist.all_to_all_single(came, flat, *lengths, group=self.processes.group)
            self.traffic.count(self.phase, (flat.numel() - lengths[1][rank]) * flat.element_size())
        pieces = [piece for pieces in incoming for piece in pieces]
        return list(zip(pieces, came.split([piece.count for piece in pieces]), strict=True)) if pieces else []


def _by_rank(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    found: list[list[Piece]] = [[] for _ in range(count)]
    for piece in pieces:
        found[piece.rank].append(piece)
    return found


@contextmanager
def named_failure(phase: str, names: Iterable[str] = ()) -> Iterator[None]:
    """Say in which phase of a step, and for which layers, a collective failed: a rank is gone, or out of step."""
    try:
        yield
    except RuntimeError as error:
        known = list(dict.fromkeys(names))
        layers = ", ".join(known[:4]) + (f" and {len(known) - 4} more" if len(known) > 4 else "")
        raise LayerwiseError(
            describe(
                f"a failed collective in the {phase}" + (f" of {layers}" if layers else ""),
                "every rank of the group to take the same step",
                "see the first rank that failed; parameters and state may differ between ranks now, restart from the "
                "last checkpoint",
            )
        ) from error


def summed(came: Sequence[tuple[Piece, Tensor]]) -> dict[str, Tensor]:
    """Pieces of one tensor from several ranks, added up in the order of the ranks."""
    found: dict[str, Tensor] = {}
    for piece, t in came:
        found[piece.key] = found[piece.key] + t if piece.key in found else t
    return found


def mean_over_ranks(processes: Processes, values: list[float], device: torch.device, what: str) -> list[float]:
    """Of numbers that every rank has of its own batch, from which all are to decide alike."""
    count = processes.count
    if count == 1:
        return values
    with named_failure(what):
        total = processes.add_up([torch.tensor(values, dtype=torch.float64, device=device)])[0]
    return (total / count).tolist()

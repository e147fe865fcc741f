"""Tables, aims and the JSON record of the tangent kernel benchmark.

A group is one model: its bare operations, the limit made of them, the systems, and errors against float64.
"""

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from limits import TRAINING
from measure import Row, Seconds
from ntk_systems import KernelSystem
from torch import Tensor

OURS, TILED = "layerwise", "layerwise, memory=0.9e9"


@dataclass
class Measured:
    """One system on one model, on all examples or on few and extrapolated by the number of pairs."""

    system: type[KernelSystem]
    row: Row
    examples: int
    total: int
    kernel: Tensor | None = None
    difference: float | None = None

    @property
    def factor(self) -> float:
        return (self.total / self.examples) ** 2

    def extrapolate(self) -> None:
        self.row.samples = [Seconds(self.factor * s.wall, self.factor * s.cpu) for s in self.row.samples]


@dataclass
class Group:
    model: str
    rows: int
    """Of the matrix."""
    device: str
    bare: dict[str, Row]
    limit: Seconds
    systems: list[Measured]
    errors: dict[str, float] = field(default_factory=dict)
    setting: str = ""
    """TF32 in convolutions, on a GPU."""

    @property
    def yardstick(self) -> Seconds:
        return self.bare[TRAINING].seconds()

    def measured(self) -> dict[str, Measured]:
        """Those with a time, by name."""
        return {m.row.name: m for m in self.systems if m.row.samples}

    def fastest(self, torch_only: bool = False) -> Measured | None:
        """The fastest other system among those that were measured on all examples."""
        others = [m for m in self.measured().values() if m.system.package != "layerwise" and m.factor == 1]
        if torch_only:
            others = [m for m in others if m.system.package != "neural_tangents"]
        return min(others, key=lambda m: m.row.seconds().wall, default=None)


def print_group(group: Group) -> None:
    where = f"{group.device}, {group.setting} in convolutions" if group.setting else group.device
    print(f"\n{group.model}: kernel {group.rows} × {group.rows}, {where}")
    head = f"{'seconds':>11s}{'× fwd+bwd':>11s}{'[CPU]':>11s}{'× limit':>9s}{'n':>4s}{'peak MB':>9s}{'difference':>12s}"
    print(f"  {'':42s}{head}")
    for row in group.bare.values():
        _print_row("· " + row.name, row.seconds(), group, f"{len(row.samples):4d}{_megabytes(row)}")
    _print_row("· limit", group.limit, group, "")
    for m in group.systems:
        if m.row.note:
            print(f"  {m.row.name:42s}   {m.row.note}")
            continue
        difference = f"{m.difference:12.1e}" if m.difference is not None else ""
        tail = f"{len(m.row.samples):4d}{_megabytes(m.row):9s}{difference}"
        if m.factor != 1:
            tail += f"  {m.examples} examples measured, time × {m.factor:.4g} for {m.total}"
        _print_row(m.row.name, m.row.seconds(), group, tail)
    for what, error in group.errors.items():
        print(f"  relative error, {what}: {error:.1e}")


def _print_row(name: str, seconds: Seconds, group: Group, tail: str) -> None:
    ratio, over = seconds.over(group.yardstick), seconds.over(group.limit)
    print(f"  {name:42s}{seconds.wall:11.4f}{ratio.wall:11.2f}{f'[{ratio.cpu:.2f}]':>11s}{over.wall:9.2f}{tail}")


def _megabytes(row: Row) -> str:
    return f"{row.peak_mb:9.0f}" if row.peak_mb is not None else ""


def aims(groups: list[Group]) -> list[dict]:
    """What the library aims at, with what was found. Extrapolated rows do not count as peers."""
    found: list[dict] = []
    for group in groups:
        ours = group.measured().get(OURS)
        if ours is None:
            continue
        if group.model == "mlp":
            found += _faster(group, [ours], 10.0)
        elif group.model == "resnet":
            found += _faster(group, [ours, *filter(None, [group.measured().get(TILED)])], 1.5, share_of_memory=1 / 3)
        elif group.model.startswith("vgg19") and group.device.startswith("cuda"):
            found.append(_aim(group, "seconds", ours.row.seconds().wall, 2.0, at_most=True))
        if group.model.startswith("vgg19"):
            worst = max(error for what, error in group.errors.items() if what.startswith("float32"))
            found.append(_aim(group, "relative error", worst, 1e-3, at_most=True))
    return found


def _faster(group: Group, ours: list[Measured], bound: float, share_of_memory: float = 0.0) -> list[dict]:
    found: list[dict] = []
    peers = {"fastest peer": group.fastest(), "fastest peer in torch": group.fastest(torch_only=True)}
    for label, peer in peers.items():
        if peer is None or (label != "fastest peer" and peer is group.fastest()):
            continue
        for m in ours:
            name = f"{label} ({peer.row.name}) / {m.row.name}"
            found.append(_aim(group, f"time: {name}", peer.row.seconds().wall / m.row.seconds().wall, bound))
            if share_of_memory and peer.row.peak_mb and m.row.peak_mb is not None:
                share = m.row.peak_mb / peer.row.peak_mb
                found.append(_aim(group, f"peak memory: {m.row.name} / {peer.row.name}", share, share_of_memory, True))
    return found


def _aim(group: Group, what: str, value: float, bound: float, at_most: bool = False) -> dict:
    reached = value <= bound if at_most else value >= bound
    model = f"{group.model}, {group.setting}" if group.setting else group.model
    where = {"model": model, "what": what, "value": float(f"{value:.4g}")}
    return where | {"bound": round(bound, 4), "at_most": at_most, "reached": reached}


def print_aims(found: list[dict]) -> None:
    if not found:
        return
    print("\naims, by wall time; peers measured on all examples only")
    for a in found:
        bound = f"{'≤' if a['at_most'] else '≥'} {a['bound']:g}"
        verdict = "reached" if a["reached"] else "NOT reached"
        print(f"  {a['model']:20s}{a['what']:98s}{a['value']:10.3g}  {bound:8s} {verdict}")


def record(groups: list[Group], found: list[dict], settings: dict, systems: list[type[KernelSystem]]) -> dict:
    models = [
        {
            "model": g.model,
            "setting": g.setting,
            "rows": g.rows,
            "limit_s": round(g.limit.wall, 4),
            "bare": [_row_record(row, g) for row in g.bare.values()],
            "systems": [_row_record(m.row, g) | _kernel_record(m) for m in g.systems],
            "errors": g.errors,
        }
        for g in groups
    ]
    return {"benchmark": "ntk", **settings, "versions": versions(systems), "models": models, "aims": found}


def _row_record(row: Row, group: Group) -> dict:
    if row.note:
        return {"row": row.name, "note": row.note}
    seconds = row.seconds()
    ratio, over = seconds.over(group.yardstick), seconds.over(group.limit)
    values = {"s": seconds.wall, "cpu_s": seconds.cpu, "ratio": ratio.wall, "cpu_ratio": ratio.cpu}
    values["over_limit"] = over.wall
    rounded = {name: float(f"{value:.5g}") for name, value in values.items()}
    return {"row": row.name} | rounded | {"n": len(row.samples), "peak_mb": row.peak_mb}


def _kernel_record(m: Measured) -> dict:
    return {"examples": m.examples, "extrapolated_by": m.factor, "difference": m.difference} if m.row.samples else {}


def versions(systems: list[type[KernelSystem]]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", "jax", *dict.fromkeys(cls.distribution for cls in systems)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found

"""Tables, aims and the JSON record of the curvature benchmark.

A group is one task on one model: {"model", "task", "limit": seconds, "bare": rows of bare operations, the
first the yardstick, "rows": those of the systems}, each row a `measure.Row`.
"""

from importlib.metadata import PackageNotFoundError, version

from measure import Row, Seconds
from peers import PEERS, SYSTEMS

AIM = 1.3


def print_group(group: dict) -> None:
    yardstick, limit = group["bare"][0].seconds(), group["limit"]
    print(f"\n{group['task']} on {group['model']}")
    print(f"  {'':40s}{'':10s}{'× fwd+bwd':>16s}{'× limit':>16s}")
    print(f"  {'':40s}{'ms':>10s}{'wall':>9s}{'CPU':>7s}{'wall':>9s}{'CPU':>7s}{'n':>4s}{'peak MB':>9s}")
    for row in group["bare"]:
        print_row("· " + row.name, row.seconds(), [yardstick], len(row.samples), row.peak_mb)
    print_row("· limit", limit, [yardstick])
    for row in group["rows"]:
        if row.note:
            print(f"  {row.name:40s}  {row.note}")
        else:
            print_row(row.name, row.seconds(), [yardstick, limit], len(row.samples), row.peak_mb)


def print_row(name: str, seconds: Seconds, relative_to: list[Seconds], n: int = 0, peak: float | None = None):
    ratios = "".join(f"{r.wall:9.2f}{r.cpu:7.2f}" for r in map(seconds.over, relative_to))
    count = f"{n:4d}" if n else ""
    memory = f"{peak:9.0f}" if peak is not None else ""
    print(f"  {name:40s}{1e3 * seconds.wall:10.2f}{ratios:32s}{count}{memory}")


def aims(groups: list[dict]) -> list[dict]:
    """What the library aims at, held or not: near the limit, no slower and no larger than the best peer."""
    found = []
    for group in groups:
        measured = {row.name: row for row in group["rows"] if row.samples}
        ours = measured.get("layerwise")
        if ours is None:
            continue
        peers = [measured[name] for name in PEERS if name in measured]
        where = {"model": group["model"], "task": group["task"]}
        if group["task"] in ("kfac-sampled", "ekfac-sampled"):
            found.append(where | _time_aim("time / limit", ours, group["limit"], AIM))
        if peers:
            fastest = Seconds(min(r.seconds().wall for r in peers), min(r.seconds().cpu for r in peers))
            found.append(where | _time_aim("time / fastest peer", ours, fastest, 1.0))
        sizes = [row.peak_mb for row in peers if row.peak_mb]
        if sizes and ours.peak_mb is not None:
            found.append(where | _aim("peak / smallest peer", ours.peak_mb / min(sizes), 1.0))
    return found


def _time_aim(what: str, ours: Row, other: Seconds, bound: float) -> dict:
    ratio = ours.seconds().over(other)
    return _aim(what, ratio.wall, bound) | {"cpu_value": round(ratio.cpu, 3)}


def _aim(what: str, value: float, bound: float) -> dict:
    return {"what": what, "value": round(value, 3), "bound": bound, "held": value <= bound}


def print_aims(found: list[dict]) -> None:
    print("\naims, by wall time (CPU time in brackets; differences of 10 % are noise on a shared machine)")
    for a in found:
        where = f"  {a['model']:13s}{a['task']:16s}{a['what']:22s}"
        cpu = f"[{a['cpu_value']:.2f}]" if "cpu_value" in a else ""
        print(f"{where}{a['value']:8.2f} {cpu:8s} ≤ {a['bound']:.2f}  {'held' if a['held'] else 'NOT HELD'}")


def record(groups: list[dict], found: list[dict], settings: dict) -> dict:
    rows = []
    for group in groups:
        yardstick, limit = group["bare"][0].seconds(), group["limit"]
        where = {"model": group["model"], "task": group["task"]}
        rows.append(where | {"row": "limit"} | _times(limit, yardstick, limit))
        rows += [where | row_record(row, yardstick, limit) for row in group["bare"] + group["rows"]]
    return {"benchmark": "curvature", **settings, "versions": versions(), "rows": rows, "aims": found}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", *dict.fromkeys(cls.distribution for cls in SYSTEMS.values())):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def row_record(row: Row, yardstick: Seconds, limit: Seconds) -> dict:
    if row.note:
        return {"row": row.name, "note": row.note}
    counts = {"n": len(row.samples), "peak_mb": row.peak_mb}
    return {"row": row.name} | _times(row.seconds(), yardstick, limit) | counts


def _times(seconds: Seconds, yardstick: Seconds, limit: Seconds) -> dict[str, float]:
    ratio, over_limit = seconds.over(yardstick), seconds.over(limit)
    values = {
        "ms": 1e3 * seconds.wall,
        "cpu_ms": 1e3 * seconds.cpu,
        "ratio": ratio.wall,
        "cpu_ratio": ratio.cpu,
    }
    values |= {"over_limit": over_limit.wall, "cpu_over_limit": over_limit.cpu}
    return {name: round(value, 4) for name, value in values.items()}

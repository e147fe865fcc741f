"""Tables, aims and the JSON record of the curvature benchmark.

A group is one task on one model: {"model", "task", "limit_s", "bare": rows of bare operations, the first the
yardstick, "rows": those of the systems}, each row a `measure.Row`.
"""

from importlib.metadata import PackageNotFoundError, version

from measure import Row
from peers import PEERS, SYSTEMS

AIM = 1.3


def print_group(group: dict) -> None:
    yardstick = group["bare"][0].seconds()
    print(f"\n{group['task']} on {group['model']}")
    print(f"  {'':40s}{'ms':>10s}{'× fwd+bwd':>11s}{'× limit':>9s}{'n':>4s}{'peak MB':>9s}")
    for row in group["bare"]:
        print_row("· " + row.name, row.seconds(), yardstick, None, len(row.wall), row.peak_mb)
    print_row("· limit", group["limit_s"], yardstick, group["limit_s"])
    for row in group["rows"]:
        if row.note:
            print(f"  {row.name:40s}  {row.note}")
        else:
            print_row(row.name, row.seconds(), yardstick, group["limit_s"], len(row.wall), row.peak_mb)


def print_row(name, seconds, yardstick, limit, n=None, peak=None) -> None:
    cells = f"{1e3 * seconds:10.2f}{seconds / yardstick:11.2f}"
    cells += f"{seconds / limit:9.2f}" if limit else " " * 9
    cells += f"{n:4d}" if n else " " * 4
    cells += f"{peak:9.0f}" if peak is not None else ""
    print(f"  {name:40s}{cells}")


def aims(groups: list[dict]) -> list[dict]:
    """What the library aims at, held or not: near the limit, no slower and no larger than the best peer."""
    found = []
    for group in groups:
        by_name = {row.name: row for row in group["rows"]}
        ours = by_name.get("layerwise")
        if ours is None or not ours.wall:
            continue
        peers = [by_name[name] for name in PEERS if name in by_name and by_name[name].wall]
        where = {"model": group["model"], "task": group["task"]}
        if group["task"] in ("kfac-sampled", "ekfac-sampled"):
            found.append(where | _aim("time / limit", ours.seconds() / group["limit_s"], AIM))
        if peers:
            fastest = min(row.seconds() for row in peers)
            found.append(where | _aim("time / fastest peer", ours.seconds() / fastest, 1.0))
        sizes = [row.peak_mb for row in peers if row.peak_mb]
        if sizes and ours.peak_mb is not None:
            found.append(where | _aim("peak / smallest peer", ours.peak_mb / min(sizes), 1.0))
    return found


def _aim(what: str, value: float, bound: float) -> dict:
    return {"what": what, "value": round(value, 3), "bound": bound, "held": value <= bound}


def print_aims(found: list[dict]) -> None:
    print("\naims (differences of 10 % are noise on a shared machine)")
    for a in found:
        where = f"  {a['model']:13s}{a['task']:16s}{a['what']:22s}"
        print(f"{where}{a['value']:8.2f}  ≤ {a['bound']:.2f}  {'held' if a['held'] else 'NOT HELD'}")


def record(groups: list[dict], found: list[dict], settings: dict) -> dict:
    rows = []
    for group in groups:
        yardstick, limit = group["bare"][0].seconds(), group["limit_s"]
        where = {"model": group["model"], "task": group["task"]}
        rows.append(where | {"row": "limit", "ms": 1e3 * limit, "ratio": limit / yardstick})
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


def row_record(row: Row, yardstick: float, limit: float) -> dict:
    if row.note:
        return {"row": row.name, "note": row.note}
    s = row.seconds()
    times = {
        "ms": 1e3 * s,
        "cpu_ms": 1e3 * row.cpu_seconds(),
        "ratio": s / yardstick,
        "over_limit": s / limit,
    }
    return {"row": row.name, **times, "n": len(row.wall), "peak_mb": row.peak_mb}

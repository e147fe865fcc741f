"""Table, orderings, record and figure of the autoencoder benchmark.

A record is what one method gave: {"method", "title", "data", "best", "edges", "runs", "trials"}, runs as dictionaries
of `autoencoder_runs.Run`, trials as {"setting", "loss", "note"}; `best` is the number of the run with the lowest final
training loss, or None.
"""

import math
from pathlib import Path
from typing import Any

Record = dict[str, Any]
EXPECTED = (
    ("ekfac-ra", "ekfac", "≤"),
    ("ekfac", "kfac", "≤"),
    ("kfac", "adam", "<"),
    ("kfac", "sgd", "<"),
)


def best(record: Record) -> dict[str, Any] | None:
    return None if record["best"] is None else record["runs"][record["best"]]


def shown(setting: dict[str, Any], edges: list[str]) -> str:
    """Options of a setting; * where the best value is at the edge of its grid."""
    return ", ".join(f"{name} {value:g}{'*' if name in edges else ''}" for name, value in setting.items())


def time_to(run: dict[str, Any], loss: float) -> float | None:
    """Seconds of training until a loss is reached, interpolated between epochs."""
    for k in range(1, len(run["losses"])):
        before, after = run["losses"][k - 1], run["losses"][k]
        if after <= loss:
            share = 1.0 if before <= after else min(1.0, (before - loss) / (before - after))
            return run["seconds"][k - 1] + share * (run["seconds"][k] - run["seconds"][k - 1])
    return None


def adam_final(records: dict[str, Record]) -> float | None:
    run = best(records["adam"]) if "adam" in records else None
    return None if run is None else run["losses"][-1]


def print_table(records: dict[str, Record]) -> None:
    target = adam_final(records)
    print(
        f"\n  {'':22s}{'loss':>8s}{'test':>8s}{'MSE':>8s}{'s/epoch':>9s}{'s to Adam':>11s}{'failed':>8s}  best setting"
    )
    for record in records.values():
        run = best(record)
        tried = record.get("trials", record["runs"])
        failed = sum(t["note"].startswith("fails") for t in tried)
        count = f"{failed}/{len(tried)}"
        if run is None:
            print(f"  {record['title']:22s}{'every cell fails':>35s}{'':18s}{count:>8s}")
            continue
        epochs = len(run["losses"]) - 1
        reached = None if target is None else time_to(run, target)
        when = "-" if reached is None else f"{reached:.1f}"
        numbers = f"{run['losses'][-1]:8.2f}{run['test_loss']:8.2f}{run['mse']:8.2f}{run['seconds'][-1] / epochs:9.2f}"
        setting = shown(run["setting"], record["edges"]) + (f"  ({run['note']})" if run["note"] else "")
        print(f"  {record['title']:22s}{numbers}{when:>11s}{count:>8s}  {setting}")
    print("  *: at the edge of its grid, so a wider one may do better")


def print_epochs(records: dict[str, Record]) -> None:
    print("\n  training loss at the end of each epoch")
    for record in records.values():
        run = best(record)
        if run is not None:
            print(f"  {record['title']:22s}" + "".join(f"{loss:8.1f}" for loss in run["losses"]))


def orderings(records: dict[str, Record]) -> list[dict[str, Any]]:
    """What is expected of the best runs, at the last epoch that both reached; and in time against Adam."""
    found = []
    for left, right, sign in EXPECTED:
        a, b = (best(records[name]) if name in records else None for name in (left, right))
        if a is None or b is None:
            continue
        epoch = min(len(a["losses"]), len(b["losses"])) - 1
        values = [a["losses"][epoch], b["losses"][epoch]]
        reached = values[0] < values[1] if sign == "<" else values[0] <= values[1]
        found.append({"what": f"{left} {sign} {right}, epoch {epoch}", "values": values, "reached": reached})
    return found + _in_time(records)


def _in_time(records: dict[str, Record]) -> list[dict[str, Any]]:
    target = adam_final(records)
    run = best(records["ekfac-ra"]) if "ekfac-ra" in records else None
    if target is None or run is None:
        return []
    took, adam = time_to(run, target), time_to(best(records["adam"]) or {}, target)
    values = [math.inf if took is None else took, math.inf if adam is None else adam]
    return [
        {"what": "ekfac-ra before adam, seconds to Adam's loss", "values": values, "reached": values[0] < values[1]}
    ]


def print_orderings(found: list[dict[str, Any]]) -> None:
    print("\n  expected")
    for item in found:
        values = " against ".join(f"{value:.2f}" for value in item["values"])
        print(f"  {item['what']:46s}{values:>22s}  {'reached' if item['reached'] else 'NOT REACHED'}")


def draw(records: dict[str, Record], path: Path) -> bool:
    """Loss against epochs and against seconds, best run of each method; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colours = ["#999999", "#000000", "#e69f00", "#f0e442", "#cc79a7", "#8c6d31", "#56b4e9", "#0072b2", "#d55e00"]
    for number, record in enumerate(records.values()):
        run = best(record)
        if run is None:
            continue
        line = {"color": colours[number % len(colours)], "label": record["title"], "linewidth": 1.6}
        line["linestyle"] = "-" if number < len(colours) else "--"
        panels[0].plot(range(1, len(run["losses"])), run["losses"][1:], **line)
        panels[1].plot(run["seconds"][1:], run["losses"][1:], **line)
    panels[0].set(xlabel="epochs", ylabel="training loss (cross-entropy an image)", yscale="log")
    panels[1].set(xlabel="seconds of training", xscale="log")
    panels[1].legend(frameon=False, fontsize="small")
    for panel in panels:
        panel.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)
    return True

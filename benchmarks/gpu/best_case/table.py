"""The best case: steps on one batch that is hardly learnt, beside limits, torch's own and other packages.

Whole iterations (zero_grad, forward, backward, step) lie between CUDA events and are queued one after the other;
nothing is waited for before all of a row are queued. After a warm-up come cycles of ten steps, and between them the
same iteration without optimizer, so that drift cancels. `amortised` is the mean of the ten steps, each at its median
over cycles, less the median iteration without optimizer; `mean` is that of all iterations, stalls of the host included.
Embeddings, norm layers and the head get AdamW: that tail is a row of its own, the engine's fallback on these parameters
alone (all gradients are computed, those of hidden matrices let go before the step), and `hidden` is what is left of a
member without its tail, and without the backward of sampled labels, which is a column (`label`). Members whose biases
get the fallback too have a tail with biases.
Members with a number take statistics every so many steps; all refresh every ten. `slowest` is the slowest of the ten
steps of a cycle, each at its median over cycles; `max` is the slowest of all. State is that of the whole optimizer.
"""

from measure import reason

from gpu.best_case.limits import ESTIMATION_AIM, estimation, limits
from gpu.best_case.model import Task, iterate
from gpu.best_case.rows import OURS, TORCH_MUON, Row, rows
from gpu.best_case.timing import measure
from gpu.marks import Marks

RATIO_AIM, STATE_AIM = 1.2, 2.0
MUON_AIM = 6.0
"""Times below torch's Muon."""
COLUMNS = (
    ("hidden", "hidden", 3),
    ("label", "label", 2),
    ("amortised", "amortised", 3),
    ("mean", "mean", 2),
    ("median", "median", 2),
    ("slowest", "slowest", 2),
    ("max", "max", 2),
    ("/median", "ratio", 2),
    ("step", "step_mean", 2),
    ("/median", "step_ratio", 2),
    ("first", "first_ms", 0),
    ("GiB", "state_gib", 2),
    ("×AdamW", "state_of_adamw", 2),
    ("held", "held_of_adamw", 2),
    ("refused", "refused", 0),
    ("loss", "loss_now", 2),
)


def print_head() -> None:
    print("\nms; hidden: hidden matrices only, amortised; first: the first iteration; ", end="")
    print("held: allocated, × AdamW's state; loss: at the end")
    print(f"  {'':30s}" + "".join(f"{head:>10s}" for head, _, _ in COLUMNS) + "  synchronisations")


def print_row(r: dict) -> None:
    if "note" in r:
        print(f"  {r['name']:30s}{r['note']}", flush=True)
        return
    cells = [(r.get(key), digits) for _, key, digits in COLUMNS]
    shown = "".join(f"{'–' if value is None else format(value, f'.{digits}f'):>10s}" for value, digits in cells)
    print(f"  {r['name']:30s}{shown}  {r['synchronisations'] or '–'}", flush=True)


def without_tail(r: dict, row: Row, found: dict[str, dict]) -> dict:
    """The same with `hidden`, where the row has a tail that could be measured."""
    tail = found.get(row.tail or "", {})
    if "amortised" in r and "amortised" in tail:
        return r | {"hidden": round(r["amortised"] - tail["amortised"] - r["label"], 3)}
    return r


def aims(found: dict[str, dict], estimated: dict) -> list[dict]:
    """What was asked for, and whether it is so."""
    checks: list[dict] = []

    def at_most(what: str, value: float | None, *bounds: float) -> None:
        if value is not None:
            checks.extend({"aim": what, "value": value, "bound": b, "held": value <= b} for b in bounds)

    for row in OURS:
        r = found.get(row.name, {})
        if "amortised" not in r:
            continue
        at_most(f"{row.name}: ms a step, hidden matrices", r.get("hidden"), *row.aims)
        over = "step_ratio" if row.sampled else "ratio"
        at_most(f"{row.name}: slowest/median of {'opt.step()' if row.sampled else 'iterations'}", r[over], RATIO_AIM)
        at_most(f"{row.name}: state, × AdamW's", r["state_of_adamw"], STATE_AIM)
        if r["synchronisations"] is not None:
            zero = r["synchronisations"] == "0"
            checks.append({"aim": f"{row.name}: synchronisations", "value": 1 - zero, "bound": 0, "held": zero})
    ours, theirs = (found.get(name, {}).get("hidden") for name in ("Muon", TORCH_MUON.name))
    if ours and theirs:
        at_most("Muon: fraction of torch's Muon", round(ours / theirs, 3), round(1 / MUON_AIM, 3))
    at_most("K-FAC estimation, × its limits", estimated.get("of_limit"), ESTIMATION_AIM)
    return checks


def print_aims(checks: list[dict]) -> None:
    if checks:
        print("\naims")
    for c in checks:
        print(f"  {c['aim']:48s}{c['value']:9.3f} ≤ {c['bound']:<6g} {'held' if c['held'] else 'NOT HELD'}")


def print_limits(found: dict, estimated: dict) -> None:
    print("\nlimits, ms")
    for name, value in found.items():
        print(f"  {name:40s}{value if isinstance(value, str) else format(value, '12.3f')}")
    if estimated:
        print("\nK-FAC estimation, sampled, hidden layers")
        for name, value in estimated.items():
            print(f"  {name:40s}{value if isinstance(value, str) else format(value, '12.3f')}")


def estimated_or_why(task: Task, found: dict) -> dict:
    try:
        return estimation(task, found)
    except Exception as error:  # the other rows are still wanted
        return {"note": f"fails: {reason(error)}"}


def best_case(device: str, tiny: bool, members: list[str] | None, peers: bool, bounds: bool, cycles: int) -> dict:
    """Prints the tables; what a JSON line says of them."""
    task = Task.make("tiny" if tiny else "gpt", device)
    print(f"best case: {task.parameters / 1e6:.1f} M parameters, one batch of {len(task.x)} × {task.x.shape[1]} tokens")
    iterate(task, task.model, None, 3, Marks(device))  # kernels are loaded, workspaces allocated
    task.model.zero_grad()
    limit = limits(task) if bounds else {}
    estimated = estimated_or_why(task, limit) if bounds else {}
    print_limits(limit, estimated)
    print_head()
    found: dict[str, dict] = {}
    for row in rows(members, peers):
        found[row.name] = without_tail(measure(task, row, cycles), row, found)
        print_row(found[row.name])
    checks = [] if tiny else aims(found, estimated)
    print_aims(checks)
    return {"cycles": cycles, "limits": limit, "estimation": estimated, "rows": list(found.values()), "aims": checks}

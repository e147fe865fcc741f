"""The page `docs/models.md`: of every model of the zoo, what has a layer rule, what falls back and why, and which of
its matrices get each optimizer's own update.

python tests/zoo/zoo_table.py          # writes the page; needs the packages of layerwise[zoo]
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zoo_entries import ENTRIES, Entry
from zoo_updates import MEMBERS, Updates, updates

import layerwise as lw

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PLACE = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Row:
    """A model's share, by number of parameters, and what is left out of it."""

    name: str
    kind: str
    parameters: int
    with_rule: int
    fallen: tuple[tuple[str, int, tuple[str, ...]], ...]
    """Reason, number of parameters and their names, blocks of one kind written once; most parameters first."""

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.with_rule / self.parameters


def row(entry: Entry) -> Row:
    """Of the layers as a Fisher matrix of the entry's batches has used them, which may be fewer than `lw.layers` hopes.

    What a layer is called with is known only when the model runs.
    """
    model = entry.model()
    data = [batch.given() for batch in entry.batches()]
    used = lw.fisher(model, data, entry.likelihood, "kfac", "exact", **entry.options)
    table: lw.LayerTable = used.table  # type: ignore[attr-defined]
    sizes, names = Counter[str](), dict[str, dict[str, None]]()
    for spec in table:
        if spec.reason is not None:
            sizes[spec.reason] += spec.form.numel()
            names.setdefault(spec.reason, {})[PLACE.sub(".*.", spec.name)] = None
    with_rule = table.numel() - sum(sizes.values())
    fallen = tuple((reason, size, tuple(names[reason])) for reason, size in sizes.most_common())
    return Row(entry.name, type(model).__name__, table.numel(), with_rule, fallen)


def render(rows: list[Row], trained: list[Updates]) -> str:
    """The page."""
    return "\n".join([*_rules(rows), "", *_updates(trained)]) + "\n"


def _rules(rows: list[Row]) -> list[str]:
    lines = [
        "# Models, and which of their parameters have a layer rule",
        "",
        "Small configurations of models that people have, with random weights. On all of them Fisher matrices (exact",
        "and empirical; implicit, lowrank, dense, block, diag), gradient moments, Jacobians and tangent kernels in",
        "float32 are within 1e-6 of plain autograd in float64, example by example (`make test-zoo`).",
        "",
        "A parameter with a layer rule is recorded as inputs and output gradients of its layer, and can have Kronecker",
        "factors. One without falls back: its gradients are exact too, but K-FAC keeps its exact block if it is small,",
        "else its diagonal.",
        "",
        "Shares are by number of parameters *of the small configuration*, where norms and biases weigh more than in a",
        "large model. Written by `python tests/zoo/zoo_table.py`; do not edit.",
        "",
        "| model | class | parameters | with a rule | what falls back |",
        "|---|---|---:|---:|---|",
    ]
    for r in rows:
        fallen = "<br>".join(f"{_percent(size / r.parameters)} {reason}: {_listed(n)}" for reason, size, n in r.fallen)
        lines.append(f"| {r.name} | {_kind(r)} | {r.parameters} | {_percent(r.share)} | {fallen} |")
    return lines


def _updates(trained: list[Updates]) -> list[str]:
    lines = [
        "## Which hidden matrices get an optimizer's own update",
        "",
        "Each model takes two training steps, on batches of different sizes, with each member's defaults. Shares are",
        "by number of entries of *hidden matrices*: parameters with two or more axes longer than one, without tables",
        "of embeddings and the output head. A matrix counts if the member treats it and its statistics have come;",
        "others get the fallback's update, AdamW's. In brackets, where it differs by more than half a per cent: the",
        "same for the model class's default configuration (of Hugging Face: about a published model's size), by names",
        "and sizes, where a side beyond `max_factor` (8192) leaves EKFAC without its update and the others with one",
        "factor.",
        "",
        f"| model | {' | '.join(MEMBERS)} | what falls back |",
        f"|---|{'---:|' * len(MEMBERS)}---|",
    ]
    for found in trained:
        cells = [_both(found.shares[member], found.at_default.get(member)) for member in MEMBERS]
        notes = "<br>".join(f"`{name}`: {why}" for name, why in found.fallen.items())
        lines.append(f"| {found.name} | {' | '.join(cells)} | {notes} |")
    return lines


def _both(small: float, default: float | None) -> str:
    differs = default is not None and abs(default - small) > 0.005
    return _percent(small) + (f" ({_percent(default)})" if differs and default is not None else "")


def _kind(r: Row) -> str:
    return "torchvision-style" if r.kind == "Sequential" else f"`{r.kind}`"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _listed(names: tuple[str, ...], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


if __name__ == "__main__":
    missing = sorted({str(e.needs) for e in ENTRIES if not e.is_installed})
    if missing:
        raise SystemExit(f"not installed: {', '.join(missing)}; pip install 'layerwise[zoo]'")
    PAGE.write_text(render([row(entry) for entry in ENTRIES], [updates(entry) for entry in ENTRIES]))

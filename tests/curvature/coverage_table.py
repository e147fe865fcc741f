"""The table of `docs/coverage.md`: which layer was compared with the oracle, in which structure and likelihood."""

from pathlib import Path

from torch import nn

import layerwise as lw
from layerwise.testing.cases import CASES, Case, case

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
LIKELIHOODS = ("categorical", "gaussian", "bernoulli")
STRUCTURES = ("dense", "block", "diag", "quasidiag", "kfac", "ekfac", "lowrank", "implicit")
MATRICES = ("hessian", "moment")
EVERY_LIKELIHOOD = (
    "mlp",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "layer_norm",
    "rms_norm",
    "batch_norm2d",
    "group_norm",
    "instance_norm",
    "embedding",
    "attention",
    "lstm",
    "gru",
    "bare_parameters",
    "bilinear",
    "prelu",
)
"""Cases that are run under all likelihoods, beside their own: one for each kind of layer."""

OTHER = "parameters of other modules"

Cell = tuple[str, str, str]
"""Case, likelihood, structure (or matrix)."""


def others(c: Case) -> tuple[str, ...]:
    """Likelihoods that a case is run under beside its own."""
    return tuple(name for name in LIKELIHOODS if name != c.likelihood) if c.name in EVERY_LIKELIHOOD else ()


def has_loss(c: Case) -> bool:
    """Whether the case's loss is a function of output and label alone."""
    return "mask" not in c.options


def expected() -> set[Cell]:
    """Everything the matrix runs."""
    cells = {(c.name, name, s) for c in CASES for name in (c.likelihood, *others(c)) for s in STRUCTURES}
    return cells | {(c.name, c.likelihood, m) for c in CASES if has_loss(c) for m in MATRICES}


def kinds(model: nn.Module) -> dict[str, bool]:
    """Kinds of layers in a model, and whether K-FAC has a Kronecker product for them."""
    table = lw.layers(model)
    found: dict[str, bool] = {}
    for module in model.modules():
        own = {id(p) for p in module.parameters(recurse=False)}
        names = [name for name, p in model.named_parameters() if id(p) in own and p.requires_grad]
        specs = [spec for spec in table if set(spec.parameters) & set(names)]
        if names:
            kind = _kind(module)
            # A subclass of a known layer is only found out when it runs.
            own_rule = kind != OTHER and any(spec.structure("kfac") == "kfac" for spec in specs)
            found[kind] = found.get(kind, False) or own_rule
    return found


def _kind(module: nn.Module) -> str:
    cls = type(module)
    if cls.__name__ == "NonDynamicallyQuantizableLinear":
        return "Linear"
    if cls.__name__.startswith("Parametriz"):
        return "Linear (parametrized)"
    if getattr(module, "groups", 1) > 1:
        return f"{cls.__name__} (groups)"
    return cls.__name__ if cls.__module__.startswith("torch.nn") else OTHER


def render(cells: set[Cell]) -> str:
    """The page."""
    columns = (*STRUCTURES, *MATRICES)
    table: dict[str, dict[str, set[str]]] = {}
    kronecker: dict[str, bool] = {}
    for name in sorted({cell[0] for cell in cells}):
        found = kinds(case(name).make()[0])
        for kind, has in found.items():
            kronecker[kind] = kronecker.get(kind, False) or has
            for _, likelihood, column in (cell for cell in cells if cell[0] == name):
                table.setdefault(kind, {}).setdefault(column, set()).add(likelihood)
    lines = [
        "# What is compared with the oracle",
        "",
        "Written by `pytest tests/curvature`, when all of it has passed; do not edit. Each letter is a likelihood",
        "under which the matrix of a small model with that layer equals one computed by dense autodiff in float64:",
        "C categorical, G gaussian, B bernoulli.",
        "",
        f"| layer | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for kind in sorted(table, key=str.lower):
        row = [_letters(table[kind].get(column, set())) for column in columns]
        if not kronecker[kind]:
            for column in ("kfac", "ekfac"):
                row[columns.index(column)] += " (blocks)"
        lines.append(f"| {kind} | {' | '.join(row)} |")
    return "\n".join([*lines, "", *_notes(cells), ""])


def _letters(likelihoods: set[str]) -> str:
    return " ".join(name[0].upper() for name in LIKELIHOODS if name in likelihoods) or "–"


def _notes(cells: set[Cell]) -> list[str]:
    names = sorted({cell[0] for cell in cells})
    return [
        "- dense, lowrank, implicit: the whole matrix. block: each layer's block, zero elsewhere. diag: the diagonal.",
        "  quasidiag: the diagonal and each bias's row.",
        "- kfac: both factors, from inputs and gradients that plain hooks saw (attention: the same model written",
        "  with linear layers). ekfac: the exact trace, and a Frobenius error not above K-FAC's.",
        "  (blocks): no Kronecker product is defined there, and exact blocks are kept instead.",
        "- Fisher matrices for the estimators exact, empirical and sampled, divided by examples and by terms;",
        "  hessian: dense and block, of torch's own loss; moment: centered, dense and implicit.",
        f"- {len(names)} models: {', '.join(f'`{name}`' for name in names)}.",
    ]

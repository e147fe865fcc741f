"""Corollary 5.3.3 and Tables D.1, D.2 of Wu (2023): backpropagating the log objective fails, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.over_seeds import bound, combined
from layerwise.experiments.wu2024 import PAPER

FIXED, LOOP = "one gradient", "meta-training"
ETAS = (0.03, 0.1, 1.0)
LONG = 80
"""Inner steps at which `lw.meta.unrolled` is asked what went wrong."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Random quadratics, numbers of inner steps, and the loop."""

    seeds: int = 3
    """Sets of problems."""
    problems: int = 5
    """Of one seed."""
    dim: int = 20
    steps: tuple[int, ...] = (10, 20, 40, 80, 160, 400)
    """Inner steps at which single gradients are compared."""
    meta_steps: int = 300
    constant: float | int = 0.01
    """The meta-step is constant/√k."""


def cells(config: Config) -> list[Cell]:
    """Gradients at fixed step sizes; gradients along meta-training, in each precision."""
    return [Cell(key=FIXED), *(Cell(key=f"{LOOP}/{p}", options={"precision": p}) for p in ("float32", "float64"))]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Problems of all seeds at once."""
    import torch

    from layerwise.studies.learning_to_learn import quadratic as study

    problem = study.problems(seeds, config.problems, config.dim)
    mine = [slice(i * config.problems, (i + 1) * config.problems) for i in range(len(seeds))]
    if cell.key != FIXED:
        precision = cell.options["precision"]
        hit = study.failures_in_the_loop(problem, study.SETTINGS, precision, config.meta_steps, config.constant)
        for seed, here in zip(seeds, mine, strict=True):
            parts = {str(s): loop.failed[here].double().mean().item() for s, loop in hit.items()}
            ends = {f"end/{s}": loop.eta[here].mean().item() for s, loop in hit.items()}
            yield Row(seed=seed, values=parts | ends)
        return
    values: list[dict[str, Any]] = [{} for _ in seeds]
    series: list[dict[str, list]] = [{"steps": list(config.steps)} for _ in seeds]
    for eta in ETAS:
        at = torch.full_like(problem.c[:, 0], eta)
        for precision in study.PRECISIONS:
            for t in config.steps:
                exact = problem.gradient(eta, t)
                found = study.backpropagated(problem, at, t, precision)
                failed, error = study.failed(found), (found - exact).abs() / exact.abs()
                within = study.fits(problem, eta, t, precision)
                beyond = study.overflows(problem, eta, t, precision)
                for value, column, here in zip(values, series, mine, strict=True):
                    value[f"failed/{precision}/η={eta:g}/t={t}"] = failed[here].double().mean().item()
                    column.setdefault(f"{precision}/η={eta:g}", []).append(failed[here].double().mean().item())
                    # The largest error where f(w_t) fits; one that failed there counts as infinite.
                    wrong = torch.where(within, torch.where(failed, torch.inf, error), 0.0)[here].max().item()
                    value[f"error/{precision}"] = max(value.get(f"error/{precision}", 0.0), wrong)
                    survived = (beyond & ~failed)[here].double().sum().item()
                    value[f"survived/{precision}"] = value.get(f"survived/{precision}", 0.0) + survived
                    value[f"stable/η={eta:g}/t={t}"] = torch.isfinite(exact[here]).double().mean().item()
    for seed, value, column, here in zip(seeds, values, series, mine, strict=True):
        one = study.Quadratic(problem.eigenvalues[here], problem.c[here])
        value |= {f"told/{p}": float(study.fault(one, 0.1, LONG, p) != "") for p in study.PRECISIONS}
        value["stable"] = min(v for name, v in value.items() if name.startswith("stable/"))
        yield Row(seed=seed, values=value, series=column)


def claims(config: Config) -> list[Claim]:
    """Where float32 fails and float64 does not, and that precision only moves the wall."""
    from layerwise.studies.learning_to_learn.settings import SETTINGS

    common: dict[str, Any] = {"seeds": config.seeds}
    share: dict[str, Any] = {"span": (0, 1), **common}
    paper: dict[str, Any] = {"origin": "paper", "source": "Corollary 5.3.3", **share}
    found = [
        bound(FIXED, "stable", ">=", 1.0, "The stable formula is finite everywhere (part of all problems).", **share),
        bound(
            FIXED,
            "error/float64",
            "<=",
            1e-6,
            "Where f(w_t) fits in float64, backpropagation agrees with the stable formula (largest relative error).",
            note="Stated first: for t ≤ 80. At η = 1 that depends on L: the wall is where f(w_t) = (ηL)^(2t) "
            "passes 10³⁰⁸, and some problems are beyond it at t = 80.",
            **common,
        ),
        *(
            bound(
                FIXED,
                f"survived/{precision}",
                "<=",
                0.0,
                f"Where f(w_t) is beyond the largest {precision}, every derivative is zero or no number (how many are "
                "not).",
                **{**paper, "span": (0, float("inf"))},
            )
            for precision in ("float32", "float64")
        ),
        bound(FIXED, "told/float32", ">=", 1.0, "`lw.meta.unrolled` says where float32 failed, at (80, .1).", **share),
        bound(
            FIXED, "told/float64", "<=", 0.0, "`lw.meta.unrolled` finds nothing wrong in float64, at (80, .1).", **share
        ),
    ]
    for precision, eta, t, fails in (
        ("float32", 0.1, 40, True),
        ("float32", 0.1, 80, True),
        ("float64", 0.1, 80, False),
        ("float64", 0.1, 400, True),
        ("float64", 1.0, 160, True),
    ):
        if t in config.steps:
            text = f"Backpropagated in {precision} at t = {t}, η = {eta:g}, the derivative is "
            text += "zero or no number on every problem." if fails else "a number on every problem."
            name, relation, target = f"failed/{precision}/η={eta:g}/t={t}", *((">=", 1.0) if fails else ("<=", 0.0))
            found.append(bound(FIXED, name, relation, target, text, **paper))
    tables: dict[str, Any] = {"origin": "paper", "source": "Tables D.1 and D.2, Tensorflow GD", **share}
    for setting in SETTINGS:
        printed = (
            f"Meta-training by backpropagation in float32 fails at {setting} (part of the problems whose derivative "
        )
        printed += "is zero or no number at some step)."
        first = setting == SETTINGS[0]
        why = {
            "expected": "fails",
            "why": "In PyTorch's float32 nothing overflows at t = 10; the thesis' code is another.",
        }
        name = str(setting)
        found.append(bound(f"{LOOP}/float32", name, ">=", 1.0, printed, **tables, **(why if first else {})))
    found.append(
        Claim(
            name=f"{LOOP}/float64",
            statement="In float64 none of the seven settings fails: precision moves the wall, it does not remove it.",
            quantity=combined(f"{LOOP}/float64", [str(s) for s in SETTINGS], lambda *parts: max(parts)),
            relation="<=",
            target=0.0,
            **share,
        )
    )
    return found


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """The part of problems on which backpropagation fails, over the number of inner steps."""
    rows = [r["series"] for r in records if r["cell"] == FIXED]

    def curve(name: str, label: str) -> Curve:
        columns = list(zip(*(row[name] for row in rows), strict=True)) if rows else []
        return Curve(label=label, x=list(config.steps) if rows else [], y=[sum(c) / len(c) for c in columns])

    panels = [
        Panel(
            title=precision,
            x_label="inner steps t",
            y_label="part of gradients that fail",
            x_scale="log",
            curves=[curve(f"{precision}/η={eta:g}", f"η = {eta:g}") for eta in ETAS],
        )
        for precision in ("float32", "float64")
    ]
    caption = "Zero or no number, over all problems and seeds. The stable formula never fails."
    return [Figure(name="autograd-wall", title="Where backpropagation fails", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="autograd-wall",
    title="Backpropagating the log objective hits a wall that precision only moves",
    paper=PAPER,
    figure="Corollary 5.3.3, Tables D.1 and D.2",
    summary=(
        "The derivative of log f(w_t)/t is bounded, but backpropagation divides by f(w_t), which overflows. Single "
        "gradients at three step sizes, and whole meta-trainings in the seven settings of the thesis, in float32 and "
        "float64, beside the stable formula. A run has failed if its derivative is zero or no number. The thesis used "
        "TensorFlow, with a precision that it does not state, and for its RMSProp row a meta-rate of .001; that row is "
        "not repeated here."
    ),
    presets={
        "smoke": Config(seeds=1, problems=3, steps=(10, 40, 80), meta_steps=8),
        "laptop": Config(),
        "paper": Config(seeds=10),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke two seconds, laptop and paper half a minute",
)

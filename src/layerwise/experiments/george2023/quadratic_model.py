"""Figure 4 of chapter 5 of George (2023): a quadratic model whose flow is known in closed form, in both regimes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Curve, Figure, Panel
from layerwise.experiments.george2023 import PAPER
from layerwise.experiments.over_seeds import POSITIVE, bound, combined, value
from layerwise.foundations.errors import InputError, describe

REGIMES = ("non-linear", "linearized")
BASES = ("lapack", "random", "aligned")
FORMULAS, REVERSAL, SPURIOUS, DENSE = "formulas", "order-reversal", "spurious-feature", "dense-networks"
EPS = 1e-3
STEP = 1e-3
"""Of gradient descent, which is compared with the flow; and half of it."""
DENSE_RUNS = {"non-linear": (0.1, 150), "linearized": (10.0, 4000)}
"""α and steps of the dense networks."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the three examples."""

    seeds: int = 5
    """Random models, random bases, and dense networks."""
    mu: tuple[float, ...] = (9.0, 8.0, 7.0, 6.0, 5.0)
    """Example 1: squared singular values."""
    examples: int = 20
    flipped: int = 5
    """Examples 2 and 3: how many have κ = −1."""
    noise: float | int = 1.0
    """η of examples 2 and 3."""
    core: float | int = 0.5
    """λ of example 3."""
    threshold: float | int = 0.3
    """Mean squared error of the easy examples at which the regimes are compared."""
    scale: float | int = 1e-3
    """σ: w starts at √σ."""
    networks: int = 20
    """Dense networks whose mean is shown."""


def check(config: Config) -> None:
    """Numbers that the examples cannot have."""
    if config.flipped >= config.examples / 2:
        given = f"flipped={config.flipped} of {config.examples}"
        raise InputError(describe(given, "fewer than half of the examples", "flip fewer"))
    if list(config.mu) != sorted(set(config.mu), reverse=True) or len(config.mu) < 2:
        raise InputError(describe(f"mu={config.mu}", "two numbers or more that descend", "sort them"))
    if config.threshold >= 1:
        raise InputError(
            describe(f"threshold={config.threshold}", "a number below 1, the error at the start", "take e.g. 0.3")
        )


def cells(config: Config) -> list[Cell]:
    """Formulas on random models; the examples; dense networks."""
    noise = [Cell(key=f"label-noise/{basis}", options={"basis": basis}, random=basis == "random") for basis in BASES]
    fixed = [Cell(key=key, random=False) for key in (REVERSAL, SPURIOUS)]
    return [Cell(key=FORMULAS), *fixed, *noise, Cell(key=DENSE)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed; where no seed enters the result is computed once."""
    found: tuple[dict[str, float], dict[str, list]] | None = None
    for seed in seeds:
        if cell.random or found is None:
            found = _measured(config, cell, seed)
        yield Row(seed=seed, values=found[0], series=found[1])


def _measured(config: Config, cell: Cell, seed: int) -> tuple[dict[str, float], dict[str, list]]:
    import numpy as np

    from layerwise import theory

    if cell.key == FORMULAS:
        return _formulas(seed), {}
    if cell.key == REVERSAL:
        return _reversal(theory.order_reversal(np.array(config.mu, dtype=float), scale=config.scale), config)
    if cell.key == DENSE:
        return _dense(theory.order_reversal(np.array(config.mu, dtype=float), scale=config.scale), config, seed)
    sizes: dict[str, Any] = {"n": config.examples, "q": config.flipped, "noise": config.noise, "scale": config.scale}
    sizes["d"] = config.examples + 5
    if cell.key == SPURIOUS:
        return _groups(theory.spurious_feature(core=config.core, **sizes), config)
    return _groups(theory.label_noise(basis=cell.options["basis"], seed=seed, **sizes), config)


def _formulas(seed: int) -> dict[str, float]:
    from layerwise.studies.training_regimes import quadratic as study

    model = study.random_model(seed)
    errors = {f"ode/{regime}": study.error_of_closed_form(model, regime) for regime in REGIMES}
    coarse, fine = (study.error_of_descent(model, step) for step in (STEP, STEP / 2))
    return errors | {"descent": coarse, "descent/halved": coarse / fine}


def _reversal(model: Any, config: Config) -> tuple[dict[str, float], dict[str, list]]:
    import numpy as np

    from layerwise import theory
    from layerwise.studies.training_regimes import quadratic as study

    series = {regime: study.half_times(model, regime) for regime in REGIMES}
    values = {f"order/{regime}": order(times) for regime, times in series.items()}
    larger = theory.order_reversal(np.array(config.mu, dtype=float), scale=2 * EPS)  # θ⁰ = ε
    values |= {f"times/{regime}": error for regime, error in study.error_of_times(larger, EPS).items()}
    return values, {"example": list(range(1, len(config.mu) + 1)), **series}


def _groups(groups: Any, config: Config) -> tuple[dict[str, float], dict[str, list]]:
    import numpy as np

    from layerwise.studies.training_regimes import quadratic as study

    values: dict[str, float] = {}
    series: dict[str, list] = {}
    for regime in REGIMES:
        at = study.at_progress(groups.model, groups.easy, regime, config.threshold)
        values |= {f"difficult/{regime}": at.difficult, f"time/{regime}": at.time}
        times = np.geomspace(at.time / 100, 30 * at.time, 120)
        errors = np.square(groups.model.outputs(study.trajectory(groups.model, regime, times)) - groups.model.y)
        for name, members in (("easy", groups.easy), ("difficult", ~groups.easy)):
            series[f"{name}/{regime}"] = errors[:, members].mean(1).tolist()
    return values, series


def _dense(model: Any, config: Config, seed: int) -> tuple[dict[str, float], dict[str, list]]:
    from layerwise.studies.training_regimes import quadratic as study

    values: dict[str, float] = {}
    series: dict[str, list] = {}
    for regime, (alpha, steps) in DENSE_RUNS.items():
        curve = study.dense_networks(model, seed, alpha=alpha, steps=steps, networks=config.networks)
        values[f"order/{regime}"] = order(study.relative_half_steps(curve))
        shown = curve[:: steps // 50][:51]
        series |= {f"output {i + 1}/{regime}": column.tolist() for i, column in enumerate(shown.T)}
        series[f"step/{regime}"] = list(range(0, steps + 1, steps // 50))[: len(shown)]
    return values, series


def order(times: Sequence[float | int]) -> float:
    """Kendall's rank correlation of times with the numbers of their examples: 1 if the first comes first, −1 if last.

    >>> order([3.0, 2.0, 1.0])
    -1.0
    """
    pairs = [(i, j) for i in range(len(times)) for j in range(i)]
    return sum((times[i] > times[j]) - (times[i] < times[j]) for i, j in pairs) / len(pairs)


def claims(config: Config) -> list[Claim]:
    """Closed forms are exact; the examples' effects have limits of ours."""
    seeds: dict[str, Any] = {"seeds": config.seeds}
    found = [
        bound(
            FORMULAS,
            f"ode/{regime}",
            "<=",
            1e-8,
            f"The closed form of the {regime} flow is what an ODE solver finds (largest difference).",
            origin="paper",
            source=source,
            note=note,
            span=POSITIVE,
            **seeds,
        )
        for regime, source, note in (
            ("non-linear", "Proposition 5.4.1, (5.4.5)", ""),
            ("linearized", "Proposition 5.4.1, (5.4.6)", "With the 2 that the print lacks: see regime-errata."),
        )
    ]
    descent = "Gradient descent on w follows the flow to first order: its error is halved with its rate (factor)."
    found.append(bound(FORMULAS, "descent/halved", "within", (1.8, 2.2), descent, **seeds))
    for regime, sign, first in (("non-linear", -1, "last"), ("linearized", 1, "first")):
        text = f"The {regime} flow learns the {first} example first and the others in turn (rank correlation)."
        relation, target = ("<=", -1) if sign < 0 else (">=", 1)
        found.append(
            bound(REVERSAL, f"order/{regime}", relation, target, text, origin="paper", source="Example 1", **seeds)
        )
        text = f"(5.4.7), corrected, is the time to ε-convergence of the {regime} flow to 2 % at ε = θ⁰ = {EPS:g}."
        found.append(bound(REVERSAL, f"times/{regime}", "<=", 0.02, text, span=POSITIVE, **seeds))
    names = [f"difficult/{regime}" for regime in REGIMES]
    for cell, least, who, source in (
        *((f"label-noise/{basis}", 0.3, f"flipped labels ({basis} basis)", "Example 2") for basis in BASES),
        (SPURIOUS, 0.4, "the minority", "Example 3"),
    ):
        found.append(
            Claim(
                name=f"{cell}/difficult",
                statement=f"When the easy examples' error is {config.threshold:g}, that of {who} is larger in the "
                "non-linear flow than in the linearized one (difference).",
                quantity=combined(cell, names, lambda a, b: a - b),
                relation=">=",
                target=least,
                origin="paper",
                source=source,
                note="How much larger is ours.",
                **seeds,
            )
        )
    found.append(
        Claim(
            name=f"{DENSE}/order",
            statement="Dense networks of two linear layers at α = 0.1 learn the last example first, as the quadratic "
            "model does (rank correlation of the steps at which outputs are half of their last).",
            quantity=value(DENSE, "order/non-linear"),
            relation="<=",
            target=-0.9,
            expected="fails",
            why="With one output a dense linear network learns a single mode, Xᵀy: all examples at almost one time.",
            origin="paper",
            source="Figure 9 of appendix C",
            span=(-1, 1),
            **seeds,
        )
    )
    return found


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Half-times of example 1, errors of both groups in examples 2 and 3, and outputs of dense networks."""
    by_cell = {record["cell"]: record["series"] for record in reversed(records)}

    def halves(regime: str) -> Panel:
        series = by_cell.get(REVERSAL, {})
        curve = Curve(label=regime, x=series.get("example", []), y=series.get(regime, []), style="points")
        return Panel(title=f"example 1, {regime}", x_label="example", y_label="half-time", curves=[curve])

    def groups(cell: str, title: str) -> Panel:
        series = by_cell.get(cell, {})
        curves = [
            Curve(label=regime, x=series.get(f"easy/{regime}", []), y=series.get(f"difficult/{regime}", []))
            for regime in REGIMES
        ]
        labels = {"x_label": "error of the easy examples", "y_label": "error of the difficult ones"}
        return Panel(title=title, curves=curves, **labels)

    def dense(regime: str) -> Panel:
        series = by_cell.get(DENSE, {})
        steps = series.get(f"step/{regime}", [])
        curves = [
            Curve(label=f"example {i + 1}", x=steps, y=series.get(f"output {i + 1}/{regime}", []))
            for i in range(len(config.mu))
        ]
        title = f"dense networks, α = {DENSE_RUNS[regime][0]:g}"
        return Panel(title=title, x_label="step", y_label="output", curves=curves)

    panels = [
        *map(halves, REGIMES),
        groups("label-noise/lapack", "example 2, label noise"),
        groups(SPURIOUS, "example 3, spurious feature"),
    ]
    caption = "Mean squared errors of one group against those of the other, along the flow. One seed."
    dense_caption = "Mean of the networks' outputs on the examples of example 1; one seed. Figure 9 of appendix C."
    return [
        Figure(name="examples", title="Examples 1 to 3 in both regimes", caption=caption, panels=panels),
        Figure(name="dense", title="Dense networks", caption=dense_caption, panels=[*map(dense, REGIMES)]),
    ]


EXPERIMENT = Experiment(
    name="quadratic-model",
    title="A quadratic model of lazy training and feature learning",
    paper=PAPER,
    figure="Proposition 5.4.1 and Figure 4 of chapter 5",
    summary=(
        "A linear function is trained by the square roots of its coefficients. Its flow, and that of the linearized "
        "model, are known in closed form: the first goes by the modes' products with the labels, the second by their "
        "size alone. Three examples: order of learning reversed, flipped labels, a spurious feature. The formulas are "
        "those of the thesis, corrected (regime-errata has both). In example 2 the basis of a degenerate eigenspace "
        "is arbitrary, and with the η = 5 of the authors' code it decides what is learned first; here η = 1, where it "
        "does not. The dense networks of appendix C are shown beside them: descent of the mean squared error, "
        "predictions α(f − f₀), rate 10⁻³/α²."
    ),
    presets={
        "smoke": Config(seeds=1, networks=5),
        "laptop": Config(),
        "paper": Config(seeds=20),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop ten seconds, paper half a minute",
    check=check,
)

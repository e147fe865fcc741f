"""Figure 5 of Zhang et al. (2025): distance to the representation after training, for thirteen learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, band, own_draws
from layerwise.experiments.progress import within_cell
from layerwise.experiments.zhang2025.head_to_head import DRAWS, PAPER, SECOND_ORDER, draws
from layerwise.studies import feature_learning as fl

LABELS = {
    "kfac": "KFAC",
    "dfw": "DFW",
    "ngd": "NGD (exact)",
    "adam": "Adam",
    "amgd": "AMGD",
    "amgd-bn": "AMGD-BN",
    "sgd": "SGD",
}
EXPONENTS = tuple(-6 + 0.5 * i for i in range(13))
GOOD = {"none": 0.3, "trace": 0.3, "max": 0.4}
"""Distances up to which a rate suits an algorithm, by scale: the noise leaves more the smaller Σ is."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Appendix F.1 with learning rates from 1e-6 to 1 by half decades."""

    seeds: int = 1
    """Independent problems."""
    scales: tuple[str, ...] = ("none",)
    exponents: tuple[float, ...] = EXPONENTS
    """Decimal logarithms of the rates."""
    steps: int = 1000
    dx: int = 100
    dy: int = 15
    k: int = 8
    batch: int = 1024

    def setting(self, scale: str) -> fl.Setting:
        """The problem at a scale."""
        return fl.Setting(scale=scale, dx=self.dx, dy=self.dy, k=self.k, batch=self.batch)

    @property
    def rates(self) -> list[float]:
        """The learning rates."""
        return [10.0**exponent for exponent in self.exponents]


SMOKE = Config(
    seeds=2,
    scales=("none", "trace"),
    exponents=tuple(-3 + 0.5 * i for i in range(7)),
    steps=150,
    dx=20,
    dy=15,
    k=3,
    batch=256,
)
"""A small problem, and seven rates from 1e-3 to 1."""


def algorithms(rates: Sequence[float]) -> dict[str, fl.Algorithm]:
    """Each at all rates."""
    return {
        "kfac": fl.KFAC(lr=rates),
        "dfw": fl.DFW(lr=rates),
        "ngd": fl.NGD(lr=rates),
        "adam": fl.Adam(lr=rates),
        "amgd": fl.AMGD(lr=rates),
        "amgd-bn": fl.AMGD(lr=rates, norm="whiten_pop"),
        "sgd": fl.SGD(lr=rates),
    }


HEADS = (
    "First declared for every seed. Which rates suit DFW depends on the eigenvalues of F⋆ᵀF⋆: seed 3 (1.1 to 19) is "
    "slow at 1e-2 and still stable at 0.1. So a share of seeds is claimed."
)
NARROW = "DFW is stable below 2/λ_max(F⋆ᵀF⋆), KFAC below 2: its range is half as wide or less."
RATE = "Appendix F.2.2"


def cells(config: Config) -> list[Cell]:
    """One a scale: all algorithms and rates of a seed share its draws."""
    return [Cell(key=scale, options={"scale": scale}) for scale in config.scales]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed, all algorithms and rates at once; a run that diverges counts as distance one."""
    setting = config.setting(cell.options["scale"])
    for seed in seeds:
        results = fl.compare(
            algorithms(config.rates),
            setting=setting,
            steps=config.steps,
            every=config.steps,
            seeds=[seed],
            progress=within_cell(),
        )
        final = {name: result.dist[0, :, -1].tolist() for name, result in results.items()}
        yield Row(
            seed=seed,
            values={f"{name}/best": min(dist) for name, dist in final.items()} | draws(setting, seed),
            series={"exponent": list(config.exponents), "lr": config.rates}
            | {f"{name}/dist": dist for name, dist in final.items()},
        )


def claims(config: Config) -> list[Claim]:
    """How many rates suit whom, at every scale; a run of another size or other rates claims nothing."""
    small = replace(config, seeds=SMOKE.seeds, scales=SMOKE.scales) == SMOKE
    if not small and (config.steps < 1000 or config.dx < 100 or config.exponents != EXPONENTS):
        return []
    seeds = min(config.seeds, 5)
    found = [claim for scale in config.scales for claim in _ranges(scale, seeds, small)]
    found += [own_draws(scale, DRAWS) for scale in config.scales if config.seeds > 1]
    return found + (_as_printed(seeds) if "none" in config.scales and not small else [])


def _claimant(scale: str, seeds: int) -> Callable[..., Claim]:
    """Makes claims of the paper about a scale."""

    def claim(name: str, statement: str, quantity: Callable, relation: str, target: Any, **others: Any) -> Claim:
        return Claim(
            name=f"{scale}/{name}",
            statement=statement,
            quantity=quantity,
            relation=relation,
            target=target,
            **{"seeds": seeds, "source": RATE, "origin": "paper", **others},
        )

    return claim


def _ranges(scale: str, seeds: int, small: bool) -> list[Claim]:
    """More rates suit KFAC than DFW, and none SGD, AMGD and Adam; as many suit exact natural gradient."""
    claim = _claimant(scale, seeds)
    good = f"≤ {GOOD[scale]:g}"
    counts = {"span": POSITIVE}
    often = (
        {"test": "share", "share": 0.5, "note": "On the small problem the best heads suit DFW as well."}
        if small
        else {}
    )
    found = [
        claim(
            "kfac-wide",
            f"KFAC finds the representation ({good}) at two rates at least.",
            width(scale, "kfac"),
            ">=",
            2,
            **counts,
        ),
        claim(
            "dfw-as-wide",
            f"As many rates suit DFW as KFAC: how many are {good}, DFW's over KFAC's.",
            relative_width(scale, "dfw"),
            ">=",
            0.9,
            expected="fails",
            why=NARROW,
            **counts,
        ),
        claim(
            "dfw-narrower",
            f"Fewer rates suit DFW than KFAC: how many are {good}, DFW's over KFAC's.",
            relative_width(scale, "dfw"),
            "<=",
            0.9,
            origin="ours",
            **counts,
            **often,
        ),
        claim(
            "ngd-narrower",
            f"Much fewer rates suit natural gradient than KFAC: how many are {good}, its over KFAC's.",
            relative_width(scale, "ngd"),
            "<=",
            0.5,
            source=f"{RATE}; {SECOND_ORDER}",
            expected="fails",
            why="With the exact Fisher in closed form it moves G as KFAC does, at every rate.",
            **counts,
        ),
        claim(
            "ngd-as-wide",
            f"About as many rates suit exact natural gradient as KFAC: how many are {good}, its over KFAC's.",
            relative_width(scale, "ngd"),
            "within",
            (0.6, 2.0),
            origin="ours",
            **counts,
        ),
    ]
    for name in ("adam", "amgd", "sgd"):
        statement = f"{LABELS[name]} does not find it at any rate: the least distance over rates."
        found.append(claim(name, statement, best(scale, name), ">=", 0.5, span=(0, 1)))
    return found


def _as_printed(seeds: int) -> list[Claim]:
    """Which rates those are, for the covariance as printed."""
    claim = _claimant("none", seeds)
    most = {"test": "share", "share": 0.7, "note": HEADS, "origin": "ours"}
    return [
        claim(
            "kfac-range",
            "KFAC finds the representation at all rates from 1e-2 to 1: the largest distance.",
            worst("none", "kfac", -2, 0),
            "<=",
            0.03,
            span=(0, 1),
        ),
        claim("dfw-good", "DFW finds it at 1e-2 and 10^-1.5.", worst("none", "dfw", -2, -1.5), "<=", 0.03, **most),
        claim("dfw-bad", "DFW does not find it at rates from 0.1.", best("none", "dfw", -1, 0), ">=", 0.5, **most),
        claim(
            "kfac-at-one",
            "KFAC at rate 1 ends further away than at 1e-2: the ratio.",
            growth,
            ">=",
            3.0,
            origin="ours",
            span=POSITIVE,
        ),
    ]


def _dist(record: Mapping, name: str) -> dict[float, float]:
    return dict(zip(record["series"]["exponent"], record["series"][f"{name}/dist"], strict=True))


def _over(
    scale: str, name: str, low: float | int, high: float | int, pick: Callable
) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        return {
            record["seed"]: pick([d for exponent, d in _dist(record, name).items() if low <= exponent <= high])
            for record in records
            if record["cell"] == scale
        }

    return quantity


def worst(
    scale: str, name: str, low: float | int = -6, high: float | int = 0
) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """The largest distance over rates from 10^low to 10^high."""
    return _over(scale, name, low, high, max)


def best(
    scale: str, name: str, low: float | int = -6, high: float | int = 0
) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """The smallest distance over rates from 10^low to 10^high."""
    return _over(scale, name, low, high, min)


def width(scale: str, name: str) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """How many rates suit an algorithm: those at which it ends within `GOOD` of the representation."""
    return _over(scale, name, -6, 0, lambda dist: sum(d <= GOOD[scale] for d in dist))


def relative_width(scale: str, name: str) -> Callable[[Sequence[Mapping]], dict[int, float]]:
    """How many rates suit an algorithm, over how many suit KFAC; not a number where none suits KFAC."""

    def quantity(records: Sequence[Mapping]) -> dict[int, float]:
        mine, kfac = width(scale, name)(records), width(scale, "kfac")(records)
        return {seed: mine[seed] / kfac[seed] if kfac[seed] else math.nan for seed in mine}

    return quantity


def growth(records: Sequence[Mapping]) -> dict[int, float]:
    """KFAC's distance at rate 1 over that at 1e-2."""
    found = {record["seed"]: _dist(record, "kfac") for record in records if record["cell"] == "none"}
    return {seed: dist[0.0] / dist[-2.0] for seed, dist in found.items()}


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Distance by rate, one panel a scale."""
    panels = [
        Panel(
            title=f"scale: {scale}",
            x_label="learning rate",
            y_label="distance to the true representation",
            x_scale="log",
            y_scale="log",
            curves=[band(records, scale, "lr", f"{name}/dist", label) for name, label in LABELS.items()],
        )
        for scale in config.scales
    ]
    return [
        Figure(
            name="learning-rates",
            title=f"Distance after {config.steps} iterations",
            caption="Median over seeds; the band spans all seeds. A run that diverged counts as 1.",
            panels=panels,
        )
    ]


EXPERIMENT = Experiment(
    name="lr-sweep",
    title="Which learning rates find features",
    paper=PAPER,
    figure="Figure 5",
    summary=(
        "Distance to the true representation after 1000 iterations for thirteen rates, and how many of them suit each "
        "algorithm, at three scales of the covariance. KFAC is good from 1e-2 to 1 on the covariance as printed, and "
        "on fewer rates the smaller Σ is; DFW on two or three grid points, since its stable rates depend on the head; "
        "SGD, AMGD and Adam nowhere. Natural gradient with the exact Fisher in closed form has KFAC's range. Preset "
        "smoke is a smaller problem at seven rates."
    ),
    presets={
        "smoke": SMOKE,
        "laptop": Config(seeds=2, scales=("none", "trace")),
        "paper": Config(seeds=5, scales=("none", "trace", "max")),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some 6 s, laptop three quarters of a minute, paper six minutes",
    check=lambda config: [config.setting(scale) for scale in config.scales],
)

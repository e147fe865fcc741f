"""Figure 2 of Zhang et al. (2025): normalised inputs make AMGD's loss converge, but to another representation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, band, bound, combined, own_draws, ratio
from layerwise.experiments.progress import within_cell
from layerwise.experiments.zhang2025 import PAPER
from layerwise.foundations.errors import InputError, unknown
from layerwise.foundations.random import stream
from layerwise.studies import feature_learning as fl

if TYPE_CHECKING:
    pass

LABELS = {
    "kfac": "KFAC",
    "amgd": "AMGD",
    "whiten_pop": "AMGD-BN (whitened, true covariance)",
    "whiten_batch": "AMGD-BN (whitened, batch)",
    "coord_batch": "AMGD-BN (by coordinate, batch)",
}
MEASURES = {"loss": "training loss", "dist": "distance to the true representation"}
CELL = "trace"
DRAWS = ("draws/problem", "draws/start", "draws/train", "draws/test")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Appendix F.1 at scale `trace`."""

    seeds: int = 2
    """Independent problems."""
    steps: int = 1000
    every: int = 20
    lr: float = 1e-2
    norms: tuple[str, ...] = ("whiten_pop", "coord_batch")
    """Readings of batch-norm that are run."""
    dx: int = 100
    dy: int = 15
    k: int = 8
    batch: int = 1024

    def setting(self) -> fl.Setting:
        """The problem."""
        return fl.Setting(scale="trace", dx=self.dx, dy=self.dy, k=self.k, batch=self.batch)


SMOKE = Config(seeds=2, steps=300, every=50, lr=2e-2, dx=20, dy=15, k=2, batch=256)
"""Small, at a larger rate: two features of twenty inputs, so that whitened AMGD converges in three hundred steps."""


def cells(config: Config) -> list[Cell]:
    """One: all algorithms of a seed share its draws."""
    return [Cell(key=CELL, options={"scale": "trace"})]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed, with the limit under full whitening, rowsp(G⋆Σ^½): its distance, and everybody's distance to it."""
    setting = config.setting()
    for seed in seeds:
        results = fl.compare(
            {
                "kfac": fl.KFAC(lr=config.lr),
                "amgd": fl.AMGD(lr=config.lr),
                **{norm: fl.AMGD(lr=config.lr, norm=norm) for norm in config.norms},
            },
            setting=setting,
            steps=config.steps,
            every=config.every,
            seeds=[seed],
            progress=within_cell(),
        )
        limit, whitened = fl.whitened_distance(setting, seed), fl.whitened_representation(setting, seed)
        values: dict[str, float | int] = {"limit": limit, "time": slowest_time(config, seed)}
        values |= {f"draws/{name}": number for name, number in fl.draws_of(setting, seed).items()}
        iteration = results["kfac"].iteration
        series: dict[str, list[float | int]] = {"iteration": list(iteration), "limit": [limit] * len(iteration)}
        for name, result in results.items():
            for measure in MEASURES:
                series[f"{name}/{measure}"] = getattr(result, measure)[0].tolist()
                values[f"{name}/{measure}"] = series[f"{name}/{measure}"][-1]
            values[f"{name}/population_loss"] = float(result.population_loss[0, -1])
            values[f"{name}/limit_dist"] = float(fl.subspace_distance(result.G[0], whitened))
            values[f"{name}/diverged_at"] = int(result.diverged_at[0])
        yield Row(seed=seed, values=values, series=series)


def slowest_time(config: Config, seed: int) -> float:
    """η T λ with λ the k-th eigenvalue of F⋆G⋆ΣG⋆ᵀF⋆ᵀ: how often the slowest direction shrinks by e on whitened inputs.

    There AMGD descends at isotropic inputs towards F⋆G⋆Σ^½, whose singular values squared are the rates of its
    directions; a G⋆ that lies where Σ is small is learned late.

    >>> 0 < slowest_time(SMOKE, 0) < slowest_time(replace(SMOKE, steps=2 * SMOKE.steps), 0)
    True
    """
    import torch

    from layerwise.studies.feature_learning.problem import draw_problem

    task = draw_problem(config.setting(), stream(seed, "problem")).train
    slowest = torch.linalg.svdvals(task.map @ task.root)[config.k - 1] ** 2
    return config.lr * config.steps * float(slowest)


def claims(config: Config) -> list[Claim]:
    """Figure 2 as a contrast with plain AMGD, for full whitening with the true covariance; and what other readings do.

    Claims are of the paper's size and of preset smoke; a run of another size claims nothing.
    """
    if replace(config, seeds=SMOKE.seeds, every=SMOKE.every) == SMOKE:
        return _claims(config, most={}, loss=0.09, near=0.05, lowered=0.2, far=0.4, coordinate=0.8)
    if config.steps < 1000 or config.dx < 100:
        return []
    most = {"test": "share", "share": 0.7, "note": SLOW}
    return _claims(config, most=most, loss=0.12, near=0.2, lowered=0.2, far=0.5, coordinate=0.5)


SLOW = (
    "First declared for every seed, with 0.2 for the loss and 0.08 for the distance from the limit, so loose that AMGD "
    "without any normalisation passed. A seed that misses has not converged: the slowest direction of F⋆G⋆Σ^½ has "
    "shrunk by less than e^8 (value `time`), and more iterations bring it to the limit. So a share of seeds is "
    "claimed; of 24 fresh problems 20 to 22 hold each."
)


def _claims(
    config: Config, *, most: dict[str, Any], loss: float, near: float, lowered: float, far: float, coordinate: float
) -> list[Claim]:
    needed = min(config.seeds, 5)
    paper = {"seeds": needed, "source": "Figure 2", "origin": "paper"}
    limit = {**paper, "source": "Section 3.1.1"}
    ours = {"seeds": needed, "source": "Figure 2"}

    return [
        bound(
            CELL, "whiten_pop/loss", "<=", loss, "Whitened inputs make AMGD's training loss converge.", **paper, **most
        ),
        Claim(
            name=f"{CELL}/whitened-over-plain",
            statement="Whitening lowers AMGD's loss: without the noise, whitened over plain.",
            quantity=ratio(CELL, "whiten_pop/population_loss", "amgd/population_loss"),
            relation="<=",
            target=lowered,
            span=POSITIVE,
            **paper,
            **most,
        ),
        bound(CELL, "whiten_pop/dist", ">=", 0.5, "AMGD on whitened inputs misses the representation.", **paper),
        bound(
            CELL,
            "whiten_pop/limit_dist",
            "<=",
            near,
            "It ends at rowsp(G⋆Σ^½): the distance between the two subspaces.",
            **limit,
            **most,
        ),
        Claim(
            name=f"{CELL}/limit",
            statement="Its distance to the representation is that of rowsp(G⋆Σ^½).",
            quantity=combined(CELL, ["whiten_pop/dist", "limit"], lambda dist, limit: abs(dist - limit)),
            relation="<=",
            target=0.01,
            span=(0, 1),
            **limit,
            **most,
        ),
        bound(CELL, "amgd/limit_dist", ">=", far, "Without normalisation AMGD is far from rowsp(G⋆Σ^½).", **ours),
        bound(CELL, "kfac/dist", "<=", 0.12, "KFAC finds the representation on the same problem.", **paper),
        Claim(
            name=f"{CELL}/coordinate-over-plain",
            statement="Scaling by coordinate, as BatchNorm1d does, does not lower AMGD's loss: scaled over plain.",
            quantity=ratio(CELL, "coord_batch/loss", "amgd/loss"),
            relation=">=",
            target=coordinate,
            span=POSITIVE,
            **ours,
        ),
        bound(
            CELL,
            "coord_batch/limit_dist",
            ">=",
            far,
            "Scaled by coordinate AMGD does not end at rowsp(G⋆Σ^½).",
            **ours,
        ),
        *([own_draws(CELL, DRAWS)] if config.seeds > 1 else []),
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Loss and distance by iteration, with the limit under whitening."""
    shown = {name: label for name, label in LABELS.items() if name in ("kfac", "amgd", *config.norms)}
    panels = []
    for measure, title in MEASURES.items():
        curves = [band(records, "trace", "iteration", f"{name}/{measure}", label) for name, label in shown.items()]
        if measure == "dist":
            curves.append(band(records, "trace", "iteration", "limit", "limit under whitening", style="dashed"))
        panels.append(Panel(title=title, x_label="iteration", y_label=measure, y_scale="log", curves=curves))
    return [
        Figure(
            name="normalisation",
            title="Normalised inputs",
            caption="Median over seeds; the band spans all seeds.",
            panels=panels,
        )
    ]


def _goes_together(config: Config) -> None:
    """Refuses sizes and names that are no problem."""
    from layerwise.studies.feature_learning.normalise import NORMS

    config.setting()
    for name in config.norms:
        if name not in NORMS:
            raise InputError(unknown("norm", name, NORMS))


EXPERIMENT = Experiment(
    name="normalisation",
    title="Batch-norm lowers the loss, not the distance",
    paper=PAPER,
    figure="Figure 2",
    summary=(
        "AMGD on normalised inputs, beside AMGD on plain ones. Of the readings of batch-norm only whitening with "
        "stable statistics (here those of the true covariance) makes its loss converge; then it learns rowsp(G⋆Σ^½) "
        "and not G⋆. How soon depends on the problem: the slowest direction shrinks by 1 − ηλ an iteration, with λ the "
        "least eigenvalue of F⋆G⋆ΣG⋆ᵀF⋆ᵀ, and where that is small AMGD has not converged after 1000 iterations. By "
        "coordinate, as torch.nn.BatchNorm1d does it, the loss is no lower than without, because the covariance is "
        "rotated."
    ),
    presets={
        "smoke": SMOKE,
        "laptop": Config(seeds=2),
        "paper": Config(seeds=5, norms=("whiten_pop", "coord_batch", "whiten_batch")),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some 3 s, laptop half a minute, paper three minutes",
    check=_goes_together,
)

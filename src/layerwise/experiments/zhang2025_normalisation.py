"""Figure 2 of Zhang et al. (2025): normalised inputs make AMGD's loss converge, but to another representation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import band, bound, combined
from layerwise.experiments.progress import within_cell
from layerwise.experiments.zhang2025_head_to_head import PAPER
from layerwise.foundations.errors import InputError, unknown
from layerwise.studies import feature_learning as fl

LABELS = {
    "kfac": "KFAC",
    "amgd": "AMGD",
    "whiten_pop": "AMGD-BN (whitened, true covariance)",
    "whiten_batch": "AMGD-BN (whitened, batch)",
    "coord_batch": "AMGD-BN (by coordinate, batch)",
}
MEASURES = {"loss": "training loss", "dist": "distance to the true representation"}


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


def cells(config: Config) -> list[Cell]:
    """One: all algorithms of a seed share its draws."""
    return [Cell(key="trace", options={"scale": "trace"})]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed, with the distance of the limit under full whitening, rowsp(G⋆Σ^½)."""
    for seed in seeds:
        results = fl.compare(
            {
                "kfac": fl.KFAC(lr=config.lr),
                "amgd": fl.AMGD(lr=config.lr),
                **{norm: fl.AMGD(lr=config.lr, norm=norm) for norm in config.norms},
            },
            setting=config.setting(),
            steps=config.steps,
            every=config.every,
            seeds=[seed],
            progress=within_cell(),
        )
        limit = fl.whitened_distance(config.setting(), seed)
        values: dict[str, float] = {"limit": limit}
        iteration = results["kfac"].iteration
        series: dict[str, list[float | int]] = {"iteration": list(iteration), "limit": [limit] * len(iteration)}
        for name, result in results.items():
            for measure in MEASURES:
                series[f"{name}/{measure}"] = getattr(result, measure)[0].tolist()
                values[f"{name}/{measure}"] = series[f"{name}/{measure}"][-1]
        yield Row(seed=seed, values=values, series=series)


def claims(config: Config) -> list[Claim]:
    """The acceptance inequalities, for full whitening with the true covariance."""
    if config.steps < 1000:
        return []
    common = {"seeds": min(config.seeds, 5), "source": "Figure 2"}
    return [
        bound("trace", "whiten_pop/loss", "<=", 0.2, "Whitened inputs make AMGD's loss converge.", **common),
        bound("trace", "whiten_pop/dist", ">=", 0.7, "AMGD on whitened inputs misses the representation.", **common),
        Claim(
            name="trace/limit",
            statement="It ends at rowsp(G⋆Σ^½), the whitened representation.",
            quantity=combined("trace", ["whiten_pop/dist", "limit"], lambda dist, limit: abs(dist - limit)),
            relation="<=",
            target=0.08,
            **common,
        ),
        bound("trace", "kfac/dist", "<=", 0.12, "KFAC finds the representation on the same problem.", **common),
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
        "AMGD on normalised inputs. Of the readings of batch-norm only whitening with stable statistics (here those of "
        "the true covariance) makes its loss converge; then it learns rowsp(G⋆Σ^½) and not G⋆. By coordinate, as "
        "torch.nn.BatchNorm1d does it, the loss is no lower than without, because the covariance is rotated."
    ),
    presets={
        "smoke": Config(seeds=1, steps=20, every=5, dx=20, dy=8, k=3, batch=256),
        "laptop": Config(seeds=2),
        "paper": Config(seeds=5, norms=("whiten_pop", "coord_batch", "whiten_batch")),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop half a minute, paper three minutes",
    check=_goes_together,
)

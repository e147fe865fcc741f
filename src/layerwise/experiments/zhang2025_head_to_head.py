"""Figure 1 of Zhang et al. (2025): who finds the representation, and who only lowers the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import band, bound, combined
from layerwise.experiments.progress import within_cell
from layerwise.studies import feature_learning as fl

PAPER = (
    "Zhang, Moniri, Nagwekar, Rahman, Xue, Hassani, Matni: On The Concurrence of Layer-wise Preconditioning Methods "
    "and Provable Feature Learning, ICML 2025, arXiv 2502.01763"
)
LABELS = {
    "sgd": "SGD",
    "amgd": "AMGD",
    "dfw": "DFW",
    "kfac": "KFAC",
    "adam": "Adam",
    "ngd": "NGD at its own rate",
    "ngd-equal": "NGD at KFAC's rate",
}
FURTHER = {"kfac": "KFAC", "amgd": "AMGD", "amgd-bn": "AMGD-BN", "altminmin": "min-min"}
MEASURES = {
    "loss": "training loss",
    "dist": "distance to the true representation",
    "transfer": "excess loss after transfer",
}
SLOW_HEAD = (
    "First declared for every seed. DFW's distance shrinks by 1 − η λ_min(F⋆ᵀF⋆) a step; seed 3, with an eigenvalue of "
    "1.1, is still at 0.14 after 1000 steps, so the claim is of three quarters of the seeds."
)
NEAR_THE_EDGE = (
    "First declared for every seed. A rate of 1e-2 is near SGD's largest stable one here: of 14 problems 3 diverged "
    "and one ended at 0.6; at 5e-3 none of the six tried did. So the claim is of half of the seeds."
)
MIDDLE = 300
"""The iteration at which the specification looks once before the end."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Appendix F.1, with the readings of the summary."""

    seeds: int = 2
    """Independent problems."""
    scales: tuple[str, ...] = ("trace",)
    """Readings of the covariance: "none" as printed, "trace" with mean eigenvalue one, "max" with largest one."""
    steps: int = 1000
    every: int = 20
    """Iterations between measurements."""
    lr: float = 1e-2
    ngd_lr: float = 1e-4
    """The paper's rate for natural gradient."""
    data: str = "uniform"
    anisotropy: str = "high"
    dx: int = 100
    dy: int = 15
    k: int = 8
    batch: int = 1024
    noise_as_variance: bool = False
    """Also run KFAC with the noise of eq. (38) read as a variance."""

    def setting(self, scale: str, **others) -> fl.Setting:
        """The problem at a scale."""
        sizes = {"dx": self.dx, "dy": self.dy, "k": self.k, "batch": self.batch}
        return fl.Setting(scale=scale, data=self.data, anisotropy=self.anisotropy, repair="abs", **sizes, **others)


def algorithms(config: Config) -> dict[str, tuple[fl.Algorithm, tuple[str, ...]]]:
    """What runs, and the names of its rates: min-min is KFAC at rate one, so it costs a rate and no algorithm."""
    lr = config.lr
    return {
        "sgd": (fl.SGD(lr=[lr]), ("sgd",)),
        "amgd": (fl.AMGD(lr=[lr]), ("amgd",)),
        "amgd-bn": (fl.AMGD(lr=[lr], norm="whiten_pop"), ("amgd-bn",)),
        "dfw": (fl.DFW(lr=[lr]), ("dfw",)),
        "kfac": (fl.KFAC(lr=[lr, 1.0]), ("kfac", "altminmin")),
        "ngd": (fl.NGD(lr=[config.ngd_lr, lr]), ("ngd", "ngd-equal")),
        "adam": (fl.Adam(lr=[lr]), ("adam",)),
    }


def cells(config: Config) -> list[Cell]:
    """One a scale: all algorithms of a seed share its draws, so they run as one piece."""
    found = [Cell(key=scale, options={"scale": scale, "noise_is": "sd"}) for scale in config.scales]
    if config.noise_as_variance:
        found.append(Cell(key="none-variance", options={"scale": "none", "noise_is": "var"}))
    return found


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed, so that a seed that is done is kept; see `compare` for why this is bit-exact and costs little."""
    chosen = algorithms(config)
    if cell.options["noise_is"] == "var":
        chosen = {"kfac": chosen["kfac"]}
    for seed in seeds:
        results = fl.compare(
            {name: algorithm for name, (algorithm, _) in chosen.items()},
            setting=config.setting(cell.options["scale"], noise_is=cell.options["noise_is"]),
            steps=config.steps,
            every=config.every,
            seeds=[seed],
            progress=within_cell(),
        )
        yield row(seed, results, {name: names for name, (_, names) in chosen.items()})


def row(seed: int, results: Mapping[str, fl.Result], names: Mapping[str, Sequence[str]]) -> Row:
    """Final values, values in the middle and curves of all algorithms, named "kfac/dist"."""
    values: dict[str, float | int] = {}
    series: dict[str, list[float | int]] = {}
    for key, result in results.items():
        series["iteration"] = list(result.iteration)
        for rate, name in enumerate(names[key]):
            for measure in (*MEASURES, "population_loss"):
                curve = getattr(result, measure)[0, rate].tolist()
                values[f"{name}/{measure}"] = curve[-1]
                if MIDDLE in result.iteration:
                    values[f"{name}/{measure}@{MIDDLE}"] = curve[result.iteration.index(MIDDLE)]
                if measure in MEASURES:
                    series[f"{name}/{measure}"] = curve
            values[f"{name}/diverged_at"] = int(result.diverged_at[0, rate])
    return Row(seed=seed, values=values, series=series)


# --- Claims -------------------------------------------------------------------------------------------------


def claims(config: Config) -> list[Claim]:
    """The acceptance inequalities of each scale that is run; short runs claim less."""
    found: list[Claim] = []
    for scale in config.scales:
        if config.steps < 1000:
            found += _short(scale, config.seeds)
        elif scale == "none":
            found += _as_printed(_needed(config))
        elif scale == "trace":
            found += _trace(_needed(config))
    if config.noise_as_variance:
        found.append(
            bound(
                "none-variance",
                "kfac/loss",
                "within",
                (0.75 * 0.85, 0.75 * 1.15),
                "With the noise's number read as a variance KFAC ends at its floor, dy σ²/2 = 0.75.",
                seeds=_needed(config),
                source="eq. (38)",
            )
        )
    return found


def _needed(config: Config) -> int:
    return min(config.seeds, 5)


def _short(scale: str, seeds: int) -> list[Claim]:
    return [
        bound(scale, "kfac/dist", "<=", 0.25, "KFAC nears the representation.", seeds=seeds, source="Figure 1"),
        Claim(
            name=f"{scale}/kfac-before-adam",
            statement="KFAC is nearer to the representation than Adam.",
            quantity=combined(scale, ["kfac/dist", "adam/dist"], lambda kfac, adam: kfac / adam),
            relation="<",
            target=1.0,
            seeds=seeds,
            source="Figure 1",
        ),
        Claim(
            name=f"{scale}/dfw-before-adam",
            statement="DFW is nearer to the representation than Adam.",
            quantity=combined(scale, ["dfw/dist", "adam/dist"], lambda dfw, adam: dfw / adam),
            relation="<",
            target=1.0,
            seeds=seeds,
            source="Figure 1",
        ),
    ]


def _trace(seeds: int) -> list[Claim]:
    """Scale `trace`: many lower the loss, only those that invert the inputs' covariance find the representation."""

    def of(name: str, relation: str, target: float | int, statement: str) -> Claim:
        return bound("trace", name, relation, target, statement, seeds=seeds, source="Figure 1")

    found = [
        of("kfac/dist", "<=", 0.12, "KFAC finds the representation."),
        of("kfac/loss", "<=", 0.09, "KFAC's training loss ends at its floor, 0.075."),
        of("kfac/transfer", "<=", 0.3, "KFAC's representation serves another task; the floor is 0.117."),
        of("dfw/dist", "<=", 0.25, "DFW finds the representation."),
        _ratio("trace", seeds, "<=", 0.8),
    ]
    for name, loss, dist, transfer in (("sgd", 0.5, 0.7, 10), ("amgd", 0.5, 0.7, 10), ("adam", 0.12, 0.5, 5)):
        label = LABELS[name]
        lowered = f"{label} lowers the training loss (from about 30)."
        often = {"test": "share", "share": 0.5, "note": NEAR_THE_EDGE} if name == "sgd" else {}
        found += [
            bound("trace", f"{name}/loss", "<=", loss, lowered, seeds=seeds, source="Figure 1", **often),
            of(f"{name}/dist", ">=", dist, f"{label} does not find the representation."),
            of(f"{name}/transfer", ">=", transfer, f"{label}'s representation does not serve another task."),
        ]
    return [*found, *_natural("trace", seeds)]


def _as_printed(seeds: int) -> list[Claim]:
    """Scale `none`: eigenvalues up to 1e5, where plain gradients cannot run at the stated rate."""

    def of(name: str, relation: str, target: float | int | tuple[float | int, float | int], statement: str) -> Claim:
        return bound("none", name, relation, target, statement, seeds=seeds, source="Figure 1")

    return [
        of("kfac/dist", "<=", 0.003, "KFAC finds the representation."),
        of("kfac/loss", "within", (0.065, 0.085), "KFAC's training loss ends at its floor, 0.075."),
        of("kfac/transfer", "<=", 0.3, "KFAC's representation serves another task; the floor is 0.117."),
        bound(
            "none",
            "dfw/dist",
            "<=",
            0.1,
            "DFW finds the representation, on most heads.",
            seeds=seeds,
            source="Figure 1",
            test="share",
            share=0.75,
            note=SLOW_HEAD,
        ),
        of("adam/dist", ">=", 0.5, "Adam does not find the representation."),
        of("adam/loss", "<=", 500, "Adam lowers the training loss (from about 2e5)."),
        of("amgd/dist", ">=", 0.9, "AMGD does not find the representation."),
        of("amgd/loss", ">=", 5e4, "AMGD does not lower the training loss: its rate is above what is stable."),
        of("sgd/diverged_at", "within", (1, 10), "SGD overflows at the stated rate."),
        of("ngd-equal/dist", "<=", 0.003, "Exact natural gradient at KFAC's rate finds the representation."),
        _ratio("none", seeds, "<", 1.0),
        Claim(
            name="none/kfac-before-dfw-in-the-middle",
            statement=f"KFAC is nearer than DFW at iteration {MIDDLE} already.",
            quantity=combined("none", [f"kfac/dist@{MIDDLE}", f"dfw/dist@{MIDDLE}"], lambda kfac, dfw: kfac / dfw),
            relation="<",
            target=1.0,
            seeds=seeds,
            expected="fails",
            why=(
                "Seen on the first seeds tried, but not a law: DFW's distance shrinks by 1 − η λ_min(F⋆ᵀF⋆) a step, "
                "KFAC's by 1 − η. Where the smallest eigenvalue exceeds one, DFW is ahead until noise decides."
            ),
            source="Figure 1",
        ),
        *_natural("none", seeds),
    ]


def _ratio(scale: str, seeds: int, relation: str, target: float) -> Claim:
    return Claim(
        name=f"{scale}/kfac-before-dfw",
        statement="KFAC ends nearer to the representation than DFW.",
        quantity=combined(scale, ["kfac/dist", "dfw/dist"], lambda kfac, dfw: kfac / dfw),
        relation=relation,
        target=target,
        seeds=seeds,
        source="Figure 1",
    )


def _natural(scale: str, seeds: int) -> list[Claim]:
    return [
        bound(
            scale,
            "ngd/dist",
            ">=",
            0.9,
            "Natural gradient at the paper's rate, 1e-4, does not find the representation.",
            seeds=seeds,
            source="Figure 1",
        ),
        Claim(
            name=f"{scale}/ngd-behind-kfac",
            statement="Natural gradient is behind KFAC (twice as far, at the same rate).",
            quantity=combined(scale, ["ngd-equal/dist", "kfac/dist"], lambda ngd, kfac: ngd / kfac),
            relation=">=",
            target=2.0,
            seeds=seeds,
            expected="fails",
            why=(
                "The joint Fisher is singular, with nullity k²; solved in closed form, exact natural gradient moves G "
                "as KFAC does and ties with it at the same rate. It was run at 1e-4, where (1 − 1e-4)^1000 = 0.90."
            ),
            source="Figure 1, caption",
        ),
    ]


# --- Figures ------------------------------------------------------------------------------------------------


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """For each scale: loss, distance and transfer by iteration."""
    found = []
    for scale in config.scales:
        found.append(
            Figure(
                name=f"head-to-head-{scale}",
                title=f"Loss, distance, transfer (scale: {scale})",
                caption="Median over seeds; the band spans all seeds. Lines end where a run overflows.",
                panels=_panels(records, scale, LABELS),
            )
        )
        found.append(
            Figure(
                name=f"head-to-head-further-{scale}",
                title=f"Whitened inputs and alternating minimisation (scale: {scale})",
                caption="AMGD-BN sees inputs whitened with the true covariance; min-min is KFAC at rate one.",
                panels=_panels(records, scale, FURTHER),
            )
        )
    return found


def _panels(records: Sequence[Record], scale: str, labels: Mapping[str, str]) -> list[Panel]:
    return [
        Panel(
            title=title,
            x_label="iteration",
            y_label=measure,
            y_scale="log",
            curves=[band(records, scale, "iteration", f"{name}/{measure}", label) for name, label in labels.items()],
        )
        for measure, title in MEASURES.items()
    ]


EXPERIMENT = Experiment(
    name="head-to-head",
    title="Layer-wise preconditioning finds features",
    paper=PAPER,
    figure="Figure 1",
    summary=(
        "A two-layer linear network FG learns y = F⋆G⋆x + ε from anisotropic inputs (condition number 1e5). Many "
        "algorithms lower the training loss; only those that invert the inputs' covariance find the rows of G⋆, and "
        "only their representation serves another task. The covariance as printed (scale none) has eigenvalues up to "
        "1e5, where SGD overflows at the stated rate; divided to mean eigenvalue one (scale trace) the caption comes "
        "true for SGD, AMGD and Adam at once, so both are run. Initial weights, number of iterations (1000) and the "
        "law of the heads' rotation are not stated in the paper and chosen here."
    ),
    presets={
        "smoke": Config(seeds=1, scales=("none",), steps=300),
        "laptop": Config(seeds=2, scales=("trace",)),
        "paper": Config(seeds=8, scales=("none", "trace"), noise_as_variance=True),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke some 4 s, laptop half a minute, paper three minutes",
    check=lambda config: [config.setting(scale) for scale in config.scales],
)

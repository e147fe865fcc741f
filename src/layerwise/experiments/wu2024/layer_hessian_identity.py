"""(4.1) and (C.6) of Wu (2023): within one layer of a ReLU network, the Hessian is E[M ⊗ xxᵀ], exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, bars, bound
from layerwise.experiments.wu2024 import PAPER
from layerwise.foundations.errors import InputError, describe

SOURCE = "(4.1), (C.6) and (C.13)"
INPUTS, CLASSES = 64, 10


@dataclass(frozen=True, kw_only=True)
class Config:
    """A small network on the digits, in float64."""

    seeds: int = 3
    """Weights."""
    hidden: tuple[int, ...] = (8, 8)
    examples: int = 50


def check(config: Config) -> None:
    """The digits are there, and as many as that."""
    from layerwise.studies.hessian_structure.networks import check_present

    check_present("digits")
    if config.examples > 1797:
        raise InputError(describe(f"examples={config.examples}", "at most the 1797 digits", "take fewer"))


def cells(config: Config) -> list[Cell]:
    """A piecewise-linear activation and a smooth one."""
    return [Cell(key="relu"), Cell(key="tanh")]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed."""
    from layerwise.studies.hessian_structure.identity import identity

    sizes = (INPUTS, *config.hidden, CLASSES)
    for seed in seeds:
        found = identity(sizes, cell.key, config.examples, seed)
        yield Row(seed=seed, values={**found._asdict(), "refused": int(found.refused)})


def claims(config: Config) -> list[Claim]:
    """Exact within a layer, and not across layers or with smooth activations."""
    ours: dict[str, Any] = {"seeds": config.seeds, "span": POSITIVE}
    paper: dict[str, Any] = {**ours, "origin": "paper", "source": SOURCE}
    return [
        bound(
            "relu",
            "within",
            "<=",
            1e-10,
            "ReLU: E[M ⊗ xxᵀ] is the Hessian in a layer's weights (relative distance, largest over layers).",
            note="Against the loss differentiated twice. An earlier calculation had 3e-16.",
            **paper,
        ),
        bound(
            "relu",
            "across",
            ">=",
            0.01,
            "ReLU: across layers the Gauss–Newton matrix is not the Hessian (relative distance in all weights).",
            note="Outputs are not linear in the weights of two layers together. Of random networks: .71 to .76 on "
            "seeds 100 to 102.",
            **ours,
        ),
        bound(
            "tanh",
            "within",
            ">=",
            0.01,
            "tanh: E[M ⊗ xxᵀ] with M = GᵀAG is not the Hessian in a layer's weights (relative distance, largest over "
            "layers).",
            note="The thesis treats piecewise-linear activations only. It is .58 to 1.00 on seeds 100 to 102.",
            **ours,
        ),
        bound(
            "tanh",
            "refused",
            ">=",
            1,
            "tanh: `lw.structure.layer_hessian` does not take one for the other without being told to.",
            **ours,
        ),
    ]


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """Distances."""
    names = {"within": "within a layer", "across": "all weights"}
    panels = [
        Panel(title=cell.key, x_label="", y_label="relative distance", curves=bars(records, cell.key, names))
        for cell in cells(config)
    ]
    caption = "Gauss–Newton matrix and Hessian: relative Frobenius distance; median over seeds, with least and largest."
    return [Figure(name="layer-hessian-identity", title="Gauss–Newton or Hessian?", caption=caption, panels=panels)]


EXPERIMENT = Experiment(
    name="layer-hessian-identity",
    title="Within a layer of a ReLU network the Hessian is E[M ⊗ xxᵀ]",
    paper=PAPER,
    figure=SOURCE,
    summary=(
        "The outputs of a ReLU network are linear in the weights of any single layer, almost everywhere. So the "
        "Hessian in these weights has no second derivatives of the network in it: it is the Gauss–Newton matrix, a "
        "mean of Kronecker products. Not so for all weights together, nor with smooth activations."
    ),
    presets={
        "smoke": Config(seeds=1, hidden=(3,), examples=10),
        "laptop": Config(),
        "paper": Config(seeds=10, examples=200),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke a second, laptop and paper some seconds",
    check=check,
)

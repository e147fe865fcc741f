"""Beyond Wu (2023): layers of a small transformer, most of which stand behind a layer norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Cell, Experiment, Record, Row
from layerwise.experiments.figures import Figure, Panel
from layerwise.experiments.over_seeds import POSITIVE, bars, combined
from layerwise.experiments.progress import within_cell
from layerwise.experiments.wu2024 import PAPER
from layerwise.experiments.wu2024.trained_networks import least, over_layers
from layerwise.foundations.errors import InputError, describe

if TYPE_CHECKING:
    from layerwise.studies.hessian_structure.transformer import Characters

CELL = "transformer"
MEASURES = {
    "alignment": "mean and leading input",
    "ratio": "γ₁/γ₂ of E[xxᵀ]",
    "spectral": "relative error of the Kronecker product",
    "overlap@c-1": "overlap of leading spaces",
    "rank_one": "rank-one-ness of eigenvectors",
    "along_mean": "their part along the leading input",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """A transformer, its training by Adam, and the windows on which its layers are looked at."""

    seeds: int = 3
    """Weights and batches; the windows of the matrices are the same."""
    text: str = "shakespeare"
    """"shakespeare" (in the folder that LAYERWISE_DATA names), or "python": the source of Python's argparse."""
    width: int = 16
    heads: int = 2
    depth: int = 1
    length: int = 8
    """Characters of a window."""
    lr: float | int = 3e-3
    batch: int = 32
    steps: int = 1000
    examples: int = 24
    """Windows of the matrices."""
    device: str = "cpu"

    def study(self) -> Characters:
        """The transformer."""
        from layerwise.studies.hessian_structure.transformer import Characters

        names = ("text", "width", "heads", "depth", "length", "lr", "batch", "device")
        return Characters(**{name: getattr(self, name) for name in names})


def check(config: Config) -> None:
    """What does not go together, or is not there."""
    windows, _ = config.study().windows()
    if config.examples < 2 or len(windows) < config.examples:
        raise InputError(describe(f"examples={config.examples}", "two windows or more", "take e.g. 24"))


def cells(config: Config) -> list[Cell]:
    """One, before and after training."""
    return [Cell(key=CELL)]


def run(config: Config, cell: Cell, seeds: Sequence[int]) -> Iterator[Row]:
    """Seed by seed: "head/spectral@start", …"""
    for seed in within_cell().track(seeds, "transformers", len(seeds)):
        values: dict[str, Any] = {}
        for step, loss, layers in config.study().measured((0, config.steps), config.examples, seed):
            place = "start" if step == 0 else "end"
            values[f"loss@{place}"] = loss
            for layer, found in layers.items():
                values |= {f"{layer}/{name}@{place}": found.values[name] for name in MEASURES}
        yield Row(seed=seed, values=values)


def layers_of(config: Config, *kinds: str) -> list[str]:
    """Those of all blocks, by the ends of their names."""
    names = [*(f"blocks.{k}.{name}" for k in range(config.depth) for name in ORDER[:-1]), "head"]
    return [name for name in names if name.rpartition(".")[2] in kinds]


ORDER = ("qkv", "projection", "up", "down", "head")


def claims(config: Config) -> list[Claim]:
    """As with batch norm: where inputs have no mean there is no structure."""
    ours: dict[str, Any] = {"seeds": config.seeds, "note": NOTE}
    share: dict[str, Any] = {**ours, "span": (0, 1)}
    ratio: dict[str, Any] = {**ours, "span": POSITIVE}
    normed, behind, every = layers_of(config, "qkv", "up"), layers_of(config, "down"), layers_of(config, *ORDER)
    found = [
        least(
            CELL,
            behind,
            "alignment@end",
            0.85,
            "Behind GELU (the second layer of each perceptron) the leading input is the mean (squared cosine, least).",
            **share,
        ),
        least(
            CELL,
            ["head"],
            "rank_one@end",
            0.8,
            "Leading eigenvectors of the last layer are nearly outer products (mean ‖Mat h‖₂/‖Mat h‖_F of ten).",
            **share,
        ),
        Claim(
            name="head",
            statement="The last layer is nearer to a Kronecker product than one behind a norm in a block is (relative "
            "spectral error over the largest of theirs).",
            quantity=combined(
                CELL,
                ["head/spectral@end", *(f"{layer}/spectral@end" for layer in normed)],
                lambda head, *others: head / max(others),
            ),
            relation="<=",
            target=0.95,
            **ratio,
        ),
    ]
    if config.steps < FULL:
        return found
    return [
        *found,
        Claim(
            name="layer-norm",
            statement="Behind a layer norm in a block (queries, keys and values; first layer of the perceptron) the "
            "Kronecker product is far from the Gauss–Newton matrix (relative spectral error, least).",
            quantity=over_layers(CELL, normed, "spectral@end", min),
            relation=">=",
            target=0.4,
            **ratio,
        ),
        Claim(
            name="eigenvectors",
            statement="There, leading eigenvectors have little to do with the leading input (mean ‖Mat(h) v₁‖² of ten, "
            "largest).",
            quantity=over_layers(CELL, normed, "along_mean@end", max),
            relation="<=",
            target=0.5,
            **share,
        ),
        Claim(
            name="training-adds-correlation",
            statement="As in fully connected networks, training takes the matrices away from Kronecker products (mean "
            "relative error over layers, after over before).",
            quantity=combined(
                CELL,
                [f"{layer}/spectral@{place}" for place in ("end", "start") for layer in every],
                lambda *values: sum(values[: len(every)]) / sum(values[len(every) :]),
            ),
            relation=">=",
            target=1.1,
            **ratio,
        ),
    ]


FULL = 1000
"""Steps: of a training of fewer less is claimed."""
NOTE = (
    "On seeds 100 and 101, after 1000 steps (and before): relative errors .80, .79 (.75, .74) of queries, keys and "
    "values, .54, .54 (.20, .14) of the projection behind attention, .54, .66 (.50, .44) and .33, .54 (.22, .21) of "
    "the perceptron, .49, .49 (.39, .39) of the last layer. Rank-one-ness .71, .69; .88, .85; .76, .79; .84, .81; "
    ".91, .96. Along the leading input .21, .20; .45, .33; .30, .25; .55, .51; .67, .79. Alignment of the input of "
    "the perceptron's second layer .92, .98."
)


def figures(config: Config, records: Sequence[Record]) -> list[Figure]:
    """By layer, before and after."""
    found = []
    layers = layers_of(config, *ORDER)
    for place, when in (("start", "before training"), ("end", f"after {config.steps} steps")):
        panels = [
            Panel(
                title=title,
                x_label="",
                y_label=title,
                curves=bars(records, CELL, {f"{layer}/{name}@{place}": layer for layer in layers}),
            )
            for name, title in MEASURES.items()
        ]
        caption = "Median over seeds, with least and largest; of ten leading eigenvectors."
        title = f"A character transformer {when}"
        found.append(Figure(name=f"transformer-{place}", title=title, caption=caption, panels=panels))
    return found


EXPERIMENT = Experiment(
    name="structure-of-a-transformer",
    title="Layers of a small transformer: where there is Kronecker structure",
    paper=PAPER,
    figure="beyond the thesis",
    summary=(
        "A character transformer on tiny Shakespeare, trained by Adam; its layers' Gauss–Newton matrices (with GELU "
        "and attention they are not the Hessians) on some windows, all characters of a window sharing the weights. "
        "What batch norm does to a fully connected network, layer norm does here: behind it inputs have no dominant "
        "mean, the Kronecker product is far off, and leading eigenvectors are no outer products with one input. "
        "Behind GELU and in the last layer there is some of the structure. A network as small as this, on as few "
        "windows, is no evidence for large ones."
    ),
    presets={
        "smoke": Config(seeds=1, text="python", width=8, length=2, steps=60, examples=12, lr=1e-2),
        "laptop": Config(),
        "paper": Config(width=32, heads=4, depth=2, length=16, steps=5000, examples=32, device="cuda"),
    },
    cells=cells,
    run=run,
    claims=claims,
    figures=figures,
    cost="on two cores: smoke two seconds, laptop a minute; paper minutes on a GPU",
    check=check,
)

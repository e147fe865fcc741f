"""The anchor of a small language model: trained and untrained, beside dictionaries that know no words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.selfsup import AnchorReport, anchors
from layerwise.selfsup.anchors.report import AnchorRow
from layerwise.studies.anchor_vectors.text import Text
from layerwise.studies.anchor_vectors.word_model import Training, WordModel


def windows_of(text: Text, length: int, positions: int) -> Tensor:
    """Words of the test text in windows that follow one another."""
    count = min(positions // length, len(text.test) // length)
    return text.test[: count * length].view(count, length)


def check(
    model: WordModel, windows: Tensor, k: Sequence[int], seed: int, *, controls: bool = True
) -> tuple[AnchorReport, dict[str, float]]:
    """The report of a model, and its values by name."""
    report = anchors(model, windows, head="head", k=k, positions=windows.numel(), seed=seed, controls=controls)
    values: dict[str, float] = {"perplexity": report.perplexity}
    for name, rows in {"trained": report.rows, **report.controls}.items():
        for row in rows.values():
            values |= {f"{name}/{key}@{row.k}": x for key, x in numbers(row).items()}
    cone = report.cone
    values |= {"cone/norm": cone.norm, "cone/norm deviation": cone.norm_deviation}
    values |= {"cone/cosine": cone.cosine, "cone/first direction": cone.first_direction}
    return report, values


def numbers(row: AnchorRow) -> dict[str, float]:
    """What is said of a row."""
    return {
        "variance": row.variance,
        "mse": row.anchor.mse,
        "held-out mse": row.anchor.heldout_mse,
        "r2": row.anchor.r2,
        "max error": row.anchor.max_error,
        "mse with intercept": row.with_intercept.mse,
        "r2 with intercept": row.with_intercept.r2,
        "mean atom": row.mean_atom,
        "slope": row.mean_atom_slope,
        "mean state": row.mean_state,
        "shuffled positions": row.shuffled_positions,
        "bulk": row.bulk_probability,
        "least bulk": row.least_bulk_probability,
    }


def built_in_intercept(model: WordModel, windows: Tensor) -> dict[str, float]:
    """A layer norm's states h = g u + β with Σu = 0 have ⟨h, 1/g⟩ = ⟨β, 1/g⟩: a constant that is not 0 once trained."""
    states: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda module, args, output: states.append(output.detach()))
    with torch.no_grad():
        model(windows[:64].to(model.norm.weight.device))
    handle.remove()
    direction = 1 / model.norm.weight.detach().double()
    product = states[0].double() @ direction
    return {
        "constant": float(model.norm.bias.detach().double() @ direction),
        "constant/error": float((product.mean() - model.norm.bias.detach().double() @ direction).abs()),
        "constant/deviation": float(product.std()),
    }


def untrained(training: Training, text: Text, windows: Tensor, k: int, seed: int) -> dict[str, float]:
    """A network of the same architecture before training."""
    report = anchors(
        training.start(text.words, seed).eval(), windows, head="head", k=(k,), controls=False, positions=windows.numel()
    )
    return {f"untrained/{name}@{k}": value for name, value in numbers(report.rows[k]).items()}

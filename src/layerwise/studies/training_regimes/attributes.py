"""CelebA and Waterbirds: photographs with a label and an attribute that goes with it, from files in LAYERWISE_DATA."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from layerwise.data.folder import MissingDataError, root
from layerwise.data.optional import require
from layerwise.foundations.errors import FileFormatError, NameLookupError, describe, unknown
from layerwise.regimes.groups import balanced
from layerwise.studies.fisher_geometry.convolutional import standardized
from layerwise.studies.training_regimes.stack import cross_entropy
from layerwise.studies.training_regimes.task import Task

EACH = 180
"""Test images of each pair of a label and an attribute: there are 180 blond men in the test images of CelebA."""


class Entry(NamedTuple):
    """One photograph."""

    file: Path
    label: int
    attribute: int
    """The label that the spurious feature speaks for."""
    split: str


class Photographs(NamedTuple):
    """Some of them, decoded."""

    x: UInt8[Tensor, "N 3 side side"]
    y: Int64[Tensor, "N"]
    attribute: Int64[Tensor, "N"]


def celeba(folder: Path) -> list[Entry]:
    """Blond or not; the attribute is the sex, women being blond more often."""
    attributes, parts = folder / "list_attr_celeba.txt", folder / "list_eval_partition.txt"
    need([attributes, parts, folder / "img_align_celeba"], "CelebA (aligned images, as its authors give them)")
    lines = attributes.read_text().splitlines()[1:]
    names = lines[0].split()
    splits = dict(line.split() for line in parts.read_text().splitlines() if line)
    try:
        blond, male = names.index("Blond_Hair"), names.index("Male")
        rows = [line.split() for line in lines[1:] if line]
        return [
            Entry(folder / "img_align_celeba" / file, int(a[blond] == "1"), int(a[male] != "1"), SPLITS[splits[file]])
            for file, *a in rows
        ]
    except (ValueError, KeyError, IndexError) as error:
        given = f"{attributes} or {parts}, which cannot be read ({error})"
        raise FileFormatError(describe(given, "the lists of CelebA", "copy them again")) from error


def waterbirds(folder: Path) -> list[Entry]:
    """Land or water bird; the attribute is the background."""
    table = folder / "metadata.csv"
    need([table], "Waterbirds (waterbird_complete95_forest2water2)")
    try:
        with table.open(newline="") as file:
            return [
                Entry(folder / row["img_filename"], int(row["y"]), int(row["place"]), SPLITS[row["split"]])
                for row in csv.DictReader(file)
            ]
    except (ValueError, KeyError) as error:
        given = f"{table}, which cannot be read ({error})"
        raise FileFormatError(describe(given, "columns img_filename, y, place and split", "copy it again")) from error


SPLITS = {"0": "train", "1": "validation", "2": "test"}
READERS: Mapping[str, Callable[[Path], list[Entry]]] = {"celeba": celeba, "waterbirds": waterbirds}


def need(paths: Sequence[Path], what: str) -> None:
    """Say which files are missing, and of what."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        names = ", ".join(f"{path.parent.name}/{path.name}" for path in paths)
        given = f"no {' and no '.join(map(str, missing))}"
        do = 'put it into the folder that LAYERWISE_DATA names, or take images="digits"'
        raise MissingDataError(describe(given, f"LAYERWISE_DATA with {names}: {what}", do))


def entries(images: str) -> list[Entry]:
    """The list of all photographs; nothing is decoded."""
    if images not in READERS:
        raise NameLookupError(unknown("set of photographs", images, READERS))
    return READERS[images](root() / images)


def decoded(found: Sequence[Entry], side: int) -> Photographs:
    """Square images of so many pixels."""
    Image = require("PIL.Image", "pillow", "photographs")
    pixels = []
    for entry in found:
        need([entry.file], "its photographs")
        with Image.open(io.BytesIO(entry.file.read_bytes())) as opened:
            image = opened.convert("RGB").resize((side, side))
        pixels.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(side, side, 3))
    labels = torch.tensor([entry.label for entry in found])
    return Photographs(
        torch.stack(pixels).permute(0, 3, 1, 2), labels, torch.tensor([entry.attribute for entry in found])
    )


def spurious_photographs(images: str, seed: int, train: int, side: int, device: str) -> Task:
    """Training photographs, and test ones with equally many of each pair of a label and an attribute.

    Accuracies on those whose attribute agrees with the label ("with") and on the others ("without").
    """
    listed = entries(images)
    learned = decoded([entry for entry in listed if entry.split == "train"][:train], side)
    tests = [entry for entry in listed if entry.split == "test"]
    label, attribute = (torch.tensor([getattr(entry, name) for entry in tests]) for name in ("label", "attribute"))
    chosen = balanced(label, attribute, EACH, seed)
    held = decoded([tests[k] for k in chosen.tolist()], side)
    x = learned.x.to(device).float() / 255
    agrees, y = held.y == held.attribute, learned.y.to(device)
    others = {
        name: standardized(held.x[where].to(device).float() / 255, x).unsqueeze(0)
        for name, where in (("with", agrees), ("without", ~agrees))
    }
    right_y = {"with": held.y[agrees].to(device), "without": held.y[~agrees].to(device)}

    def measure(outputs: Mapping[str, Tensor], place: Int64[Tensor, "R"]) -> dict[str, Tensor]:
        right = {name: (outputs[name].argmax(2) == right_y[name]).double().mean(1) for name in others}
        both = {"balanced": (right["with"] + right["without"]) / 2}
        return {"loss": cross_entropy(outputs["train"], y.unsqueeze(0)).mean(1), **right, **both}

    x = standardized(x).unsqueeze(0)
    return Task(seeds=(seed,), x=x, y=y.unsqueeze(0), others=others, measure=measure, classes=2)

"""Images of any data set on the Hugging Face hub, or in a folder of files in the same layout, through `datasets`."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerwise.data.images import Images, from_bytes
from layerwise.data.parquet import CHANNELS, decode
from layerwise.foundations.errors import FileFormatError, InputError, describe, not_one_of
from layerwise.foundations.optional import require
from layerwise.foundations.progress import Progress, resolve


def hub(
    repository: str,
    split: str = "train",
    *,
    image: str = "image",
    label: str = "label",
    mode: str = "RGB",
    folder: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    progress: bool | Progress | None = None,
) -> Images:
    """Images and labels of a data set by its name on the hub, ``[N, C, H, W]`` between 0 and 1. Needs the extra `hub`.

    Downloads are kept, and their checksums compared, by `datasets` itself. With `folder`, its parquet files
    (``<split>-*.parquet``) are read instead, and nothing is downloaded.

    Args:
        repository: such as "zalando-datasets/fashion_mnist".
        split: of the data set, such as "train".
        image: name of the column of images.
        label: name of the column of class numbers.
        mode: "RGB" or "L" (grey).
        folder: of parquet files in the hub's layout, in place of the hub.
        limit: only the first so many.
        progress: None shows a bar on a terminal only; True, always; False, never.
    """
    if mode not in CHANNELS:
        raise InputError(not_one_of("mode", mode, CHANNELS))
    if limit is not None and limit < 1:
        raise InputError(describe(f"limit={limit}", "a number ≥ 1, or None for all", "leave it out"))
    rows = _rows(repository, split, folder, image, label)
    count = len(rows) if limit is None else min(limit, len(rows))
    pixels, labels = [], []
    for number in resolve(progress).track(range(count), f"{repository} {split}", count):
        row = rows[number]
        pixels.append(_pixels(row[image], mode))
        labels.append(int(row[label]))
    sizes = sorted({tuple(p.shape) for p in pixels})
    if len(sizes) != 1:
        what = f"images of several sizes ({', '.join(map(str, sizes[:4]))})" if sizes else "no rows"
        raise FileFormatError(
            describe(f"{repository} {split} with {what}", "images of one size", "choose another data set")
        )
    return from_bytes(torch.stack(pixels), torch.tensor(labels, dtype=torch.int64))


def _rows(repository: str, split: str, folder: str | os.PathLike[str] | None, image: str, label: str) -> Any:
    """The split as `datasets` gives it, with images as encoded bytes."""
    datasets = require("datasets", "datasets", "data sets of the hub", extra="hub")
    source = ("parquet", {"data_files": {split: str(Path(folder) / f"{split}-*.parquet")}}) if folder else None
    try:
        name, options = source or (repository, {})
        rows = datasets.load_dataset(name, split=split, **options)
    except (OSError, ValueError, ConnectionError) as error:
        where = f"in {folder}" if folder else "on the hub"
        raise FileFormatError(
            describe(
                f"{repository!r}, split {split!r}, not readable {where} ({str(error).splitlines()[0]})",
                "a data set that `datasets` can load",
                f"type: hf download {repository} --repo-type dataset --local-dir FOLDER, then pass folder=",
            )
        ) from error
    missing = [column for column in (image, label) if column not in rows.column_names]
    if missing:
        raise InputError(
            describe(
                f"no column {missing[0]!r} in {repository} (it has {', '.join(rows.column_names)})",
                "names of the columns of images and labels",
                "pass image= and label=",
            )
        )
    return rows.cast_column(image, datasets.Image(decode=False))


def _pixels(cell: Any, mode: str) -> Tensor:
    data = cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()
    return decode(data, mode)

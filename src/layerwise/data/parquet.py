"""Images out of parquet files as on the Hugging Face hub: a column of encoded images and one of labels."""

import io
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from layerwise.data import folder as folders
from layerwise.data.images import Images, from_bytes
from layerwise.data.optional import require
from layerwise.foundations.errors import FileFormatError, InputError, describe
from layerwise.foundations.progress import Progress, resolve

BLOCK = 500
"""Rows read and decoded at a time."""
CHANNELS = {"L": 1, "RGB": 3}


@dataclass(frozen=True)
class ImageTable:
    """Where a data set of images is, and what its files hold."""

    name: str
    repository: str
    """On the hub, for the message when files are missing."""
    places: tuple[str, ...]
    """Subfolders that are looked into."""
    image: str
    label: str = "label"
    mode: str = "RGB"
    """"RGB" or "L" (grey)."""
    checksums: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """SHA-256 of known files, by split and name."""

    def read(
        self,
        split: str,
        folder: str | os.PathLike[str] | None,
        limit: int | None,
        verify: bool,
        progress: bool | Progress | None,
    ) -> Images:
        """The images of a split, decoded."""
        if limit is not None and limit < 1:
            raise InputError(describe(f"limit={limit}", "a number ≥ 1, or None for all", "leave it out"))
        files = folders.shards(folders.root(folder), self.places, split, self.repository)
        for module, package in (("pyarrow.parquet", "pyarrow"), ("PIL.Image", "pillow")):
            require(module, package, self.name)
        for path in files if verify else ():
            folders.verify(path, self.checksums.get(split, {}))
        return read_images(files, self.image, self.label, self.mode, limit, progress, f"{self.name} {split}")


def read_images(
    files: Sequence[Path],
    image: str,
    label: str,
    mode: str = "RGB",
    limit: int | None = None,
    progress: bool | Progress | None = None,
    description: str = "images",
) -> Images:
    """Decode the column `image` of all files, at most `limit` rows in all."""
    rows = sum(_open(path, (image, label)).metadata.num_rows for path in files)
    wanted = rows if limit is None else min(limit, rows)
    pixels: list[Tensor] = []
    labels: list[int] = []
    blocks = resolve(progress).track(_blocks(files, image, label, wanted), description, -(-wanted // BLOCK))
    for encoded, numbers in blocks:
        pixels += [decode(data, mode) for data in encoded]
        labels += numbers
    sizes = {tuple(p.shape) for p in pixels}
    if len(sizes) != 1:
        what = f"images of several sizes ({', '.join(map(str, sorted(sizes)))})" if sizes else "no rows"
        raise FileFormatError(describe(f"{files[0]} with {what}", "images of one size", "download it again"))
    return from_bytes(torch.stack(pixels), torch.tensor(labels, dtype=torch.int64))


def _open(path: Path, columns: Sequence[str]) -> Any:
    parquet = require("pyarrow.parquet", "pyarrow", "parquet files")
    arrow = require("pyarrow", "pyarrow", "parquet files")
    try:
        found = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise FileFormatError(
            describe(
                f"{path}, which cannot be read ({str(error).splitlines()[0]})", "a parquet file", "download it again"
            )
        ) from error
    missing = [column for column in columns if column not in found.schema_arrow.names]
    if missing:
        raise FileFormatError(
            describe(
                f"{path} without a column {missing[0]!r} (it has {', '.join(found.schema_arrow.names)})",
                f"the columns {', '.join(columns)}",
                "put the data set that the reader is for into the folder",
            )
        )
    return found


def _blocks(files: Sequence[Path], image: str, label: str, wanted: int) -> Iterator[tuple[list[bytes], list[int]]]:
    """Encoded images and labels, `BLOCK` rows at a time, until `wanted` rows have come."""
    batches = itertools.chain.from_iterable(
        _open(path, (image, label)).iter_batches(BLOCK, columns=[image, label]) for path in files
    )
    for batch in batches:
        if wanted <= 0:
            return
        batch = batch.slice(0, wanted)
        wanted -= batch.num_rows
        yield batch.column(image).field("bytes").to_pylist(), batch.column(label).to_pylist()


def decode(data: bytes, mode: str) -> UInt8[Tensor, "C H W"]:
    """One encoded image (PNG, JPEG, …) as bytes from 0 to 255, channels first."""
    Image = require("PIL.Image", "pillow", "encoded images")
    try:
        with Image.open(io.BytesIO(data)) as opened:
            converted = opened.convert(mode)
    except (Image.UnidentifiedImageError, OSError) as error:
        raise FileFormatError(
            describe(f"an image that cannot be decoded ({error})", "PNG or JPEG", "download the file again")
        ) from error
    W, H = converted.size
    flat = torch.frombuffer(bytearray(converted.tobytes()), dtype=torch.uint8)
    return flat.view(H, W, CHANNELS[mode]).permute(2, 0, 1).contiguous()

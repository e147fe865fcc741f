"""CIFAR-10: photographs of 32 × 32 pixels in ten classes."""

import os

from layerwise.data.images import Images
from layerwise.data.parquet import ImageTable
from layerwise.foundations.progress import Progress

CIFAR10 = ImageTable(
    name="CIFAR-10",
    repository="uoft-cs/cifar10",
    places=("cifar10", "cifar10/plain_text"),
    image="img",
    mode="RGB",
    checksums={
        "train": {
            "train-00000-of-00001.parquet": "d3c9a1a2d4d5f81b54adc86da0a17432f31d252badef0632a0af5c21f1ad98ab",
        },
        "test": {
            "test-00000-of-00001.parquet": "d3efd2280fa8ad50d1048bcea8d9ac683e8a02eeef7234fe5f7141b2effc9f99",
        },
    },
)


def cifar10(
    split: str = "train",
    *,
    folder: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    verify: bool = True,
    progress: bool | Progress | None = None,
) -> Images:
    """50,000 photographs (or 10,000, "test"), ``[N, 3, 32, 32]`` between 0 and 1, with their labels.

    Reads ``cifar10/<split>-*.parquet``, the layout of the Hugging Face hub. Needs the extra `data`. The recorded files
    are JPEG copies: close to the original pixels, not equal to them.

    Args:
        split: "train" or "test".
        folder: holds `cifar10/`; by default the one that the environment variable LAYERWISE_DATA names.
        limit: only the first so many.
        verify: compare the files with their recorded SHA-256; False for another version, such as the hub's own.
        progress: None shows a bar on a terminal only; True, always; False, never.

    Reference: Krizhevsky 2009.

    >>> try:
    ...     cifar10(folder="no/such/folder")
    ... except FileNotFoundError as error:
    ...     print(error)
    Got no/such/folder, which is no folder. Expected a folder. Set LAYERWISE_DATA to one that exists, ...
    """
    return CIFAR10.read(split, folder, limit, verify, progress)

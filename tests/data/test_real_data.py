"""The real files, where LAYERWISE_DATA names a folder that has them."""

import hashlib
import os
import struct
from pathlib import Path

import pytest

from layerwise import data

FOLDER = Path(os.environ.get("LAYERWISE_DATA", ""))
RAW_TRAIN_IMAGES = "6bbc9ace898e44ae57da46a324031adb"
"""MD5 of train-images-idx3-ubyte, as published."""


def needs(name):
    there = bool(os.environ.get("LAYERWISE_DATA")) and (FOLDER / name).is_dir()
    return pytest.mark.skipif(not there, reason=f"needs LAYERWISE_DATA to name a folder with {name}/")


@pytest.mark.slow
@needs("mnist")
def test_mnist_is_bit_for_bit_the_published_one():
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'layerwise[data]'")
    x, y = data.mnist()
    header = struct.pack(">4i", 2051, 60_000, 28, 28)
    raw = header + (x * 255).round().byte().numpy().tobytes()
    assert hashlib.md5(raw).hexdigest() == RAW_TRAIN_IMAGES
    assert y[:5].tolist() == [5, 0, 4, 1, 9]


@needs("cifar10")
def test_cifar10():
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'layerwise[data]'")
    x, y = data.cifar10("test", limit=1000)
    assert x.shape == (1000, 3, 32, 32)
    assert sorted(set(y.tolist())) == list(range(10))
    assert 0.4 < float(x.mean()) < 0.55

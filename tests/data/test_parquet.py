"""Readers on files made here."""

import numpy as np
import pytest
import torch
from parquet_files import encoded, random_pixels, write

from layerwise import data
from layerwise.data.parquet import BLOCK, decode, read_images
from layerwise.foundations.errors import FileFormatError, InputError

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'layerwise[data]'")
pytest.importorskip("PIL", reason="needs pillow: pip install 'layerwise[data]'")


@pytest.fixture
def grey(tmp_path):
    """Two shards of MNIST-like files, and what is in them."""
    pixels = random_pixels(10, (28, 28))
    labels = list(range(10))
    for k, rows in enumerate((slice(0, 6), slice(6, 10))):
        path = tmp_path / "mnist" / f"train-{k:05d}-of-00002.parquet"
        write(path, [encoded(p) for p in pixels[rows]], labels[rows])
    return tmp_path, torch.from_numpy(pixels).unsqueeze(1), torch.tensor(labels)


def test_grey_images_are_bit_exact(grey):
    folder, pixels, labels = grey
    x, y = data.mnist(folder=folder)
    assert torch.equal((x * 255).round().byte(), pixels)
    assert torch.equal(y, labels)


def test_variable_names_the_folder(grey, monkeypatch):
    folder, pixels, _ = grey
    monkeypatch.setenv("LAYERWISE_DATA", str(folder))
    assert len(data.mnist().x) == len(pixels)


@pytest.mark.parametrize("limit", [1, 6, 7, 99])
def test_limit_takes_the_first_rows(grey, limit):
    folder, _, labels = grey
    assert torch.equal(data.mnist(folder=folder, limit=limit).y, labels[:limit])


@pytest.mark.parametrize("limit", [0, -3])
def test_bad_limit(grey, limit):
    with pytest.raises(InputError, match=f"limit={limit}"):
        data.mnist(folder=grey[0], limit=limit)


def test_colour_images_have_channels_first(tmp_path):
    pixels = random_pixels(3, (32, 32, 3))
    write(tmp_path / "cifar10" / "test-00000-of-00002.parquet", [encoded(p) for p in pixels], [3, 1, 2], image="img")
    write(tmp_path / "cifar10" / "test-00001-of-00002.parquet", [], [], image="img")
    x, y = data.cifar10("test", folder=tmp_path)
    assert torch.equal((x * 255).round().byte(), torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert y.tolist() == [3, 1, 2]


def test_jpeg_is_decoded():
    flat = np.full((8, 8, 3), 200, dtype=np.uint8)
    found = decode(encoded(flat, "JPEG"), "RGB")
    assert found.shape == (3, 8, 8)
    assert (found.float() - 200).abs().max() <= 2


def test_more_rows_than_a_block(tmp_path):
    n = 2 * BLOCK + 3
    pixels = random_pixels(n, (2, 2))
    write(tmp_path / "a.parquet", [encoded(p) for p in pixels], list(range(n)))
    x, y = read_images([tmp_path / "a.parquet"], "image", "label", "L")
    assert y.tolist() == list(range(n))
    assert torch.equal((x * 255).round().byte().squeeze(1), torch.from_numpy(pixels))


def test_progress_counts_blocks(tmp_path):
    class Counter:
        def track(self, items, description, total):
            self.seen = (description, total)
            yield from items

    counter = Counter()
    write(tmp_path / "a.parquet", [encoded(p) for p in random_pixels(4, (2, 2))], [0] * 4)
    read_images([tmp_path / "a.parquet"], "image", "label", "L", progress=counter, description="some")
    assert counter.seen == ("some", 1)


def test_recorded_checksum_is_verified_by_default(tmp_path):
    path = tmp_path / "mnist" / "train-00000-of-00001.parquet"
    write(path, [encoded(random_pixels(1, (28, 28))[0])], [5])
    with pytest.raises(FileFormatError, match=r"SHA-256.*43811fee"):
        data.mnist(folder=tmp_path)
    assert data.mnist(folder=tmp_path, verify=False).y.tolist() == [5]


def test_wrong_column_is_named(tmp_path):
    write(tmp_path / "mnist" / "test-00000-of-00001.parquet", [], [], image="picture")
    with pytest.raises(FileFormatError, match=r"without a column 'image' .it has picture, label"):
        data.mnist("test", folder=tmp_path, verify=False)


def test_a_file_that_is_no_parquet(tmp_path):
    path = tmp_path / "mnist" / "test-00000-of-00001.parquet"
    path.parent.mkdir()
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(FileFormatError, match="Expected a parquet file"):
        data.mnist("test", folder=tmp_path, verify=False)


@pytest.mark.parametrize("broken", [b"", b"\x89PNG\r\n\x1a\n", b"text"])
def test_an_image_that_cannot_be_decoded(broken):
    with pytest.raises(FileFormatError, match="cannot be decoded"):
        decode(broken, "L")


def test_no_rows(tmp_path):
    write(tmp_path / "mnist" / "test-00000-of-00001.parquet", [], [])
    with pytest.raises(FileFormatError, match="no rows"):
        data.mnist("test", folder=tmp_path, verify=False)


def test_images_of_several_sizes(tmp_path):
    images = [encoded(random_pixels(1, (n, n))[0]) for n in (2, 3)]
    write(tmp_path / "a.parquet", images, [0, 1])
    with pytest.raises(FileFormatError, match="several sizes"):
        read_images([tmp_path / "a.parquet"], "image", "label", "L")

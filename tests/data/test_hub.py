"""Data sets by their name on the hub: through `datasets`, from a folder in the same layout."""

import sys
import types

import pytest
import torch
from parquet_files import encoded, random_pixels, write

from layerwise import data
from layerwise.foundations.errors import FileFormatError, InputError
from layerwise.foundations.optional import MissingPackageError


class Rows:
    """As much of a data set of `datasets` as is used, so that the reader is tested where that is not installed."""

    def __init__(self, cells: list[dict]) -> None:
        self.cells = cells
        self.column_names = list(cells[0]) if cells else ["image", "label"]

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, number: int) -> dict:
        return self.cells[number]

    def cast_column(self, name: str, kind: object) -> "Rows":
        return self


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    """A stand-in for `datasets`, and the calls that it got."""
    pytest.importorskip("PIL")
    calls: list[tuple] = []
    pixels = random_pixels(5, (6, 7, 3))

    def load_dataset(name: str, split: str, **options) -> Rows:
        calls.append((name, split, options))
        if name == "no/such":
            raise ValueError("Dataset 'no/such' doesn't exist on the Hub")
        return Rows([{"image": {"bytes": encoded(p), "path": None}, "label": k} for k, p in enumerate(pixels)])

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    module.Image = lambda decode: None
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls, pixels


def test_images_and_labels_by_name(asked):
    calls, pixels = asked
    found = data.hub("some/images", "test", limit=4, progress=False)
    assert calls == [("some/images", "test", {})]
    assert found.x.shape == (4, 3, 6, 7)
    assert torch.equal(found.x, torch.from_numpy(pixels[:4]).permute(0, 3, 1, 2) / 255)
    assert found.y.tolist() == [0, 1, 2, 3]


def test_what_cannot_be_read_is_named(asked):
    with pytest.raises(FileFormatError, match="hf download no/such"):
        data.hub("no/such", progress=False)
    with pytest.raises(InputError, match=r"no column .picture..*image, label"):
        data.hub("some/images", image="picture", progress=False)
    with pytest.raises(InputError, match="limit=0"):
        data.hub("some/images", limit=0)
    with pytest.raises(InputError, match="Did you mean 'RGB'"):
        data.hub("some/images", mode="RGBA")


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"layerwise\[hub\]"):
        data.hub("some/images")


def test_a_folder_in_the_layout_of_the_hub(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """With the real package, where it is installed."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    pixels = random_pixels(3, (8, 8))
    write(tmp_path / "grey" / "train-00000-of-00001.parquet", [encoded(p) for p in pixels], [2, 0, 1])
    found = data.hub("some/grey", folder=tmp_path / "grey", mode="L", progress=False)
    assert torch.equal(found.x[:, 0], torch.from_numpy(pixels) / 255)
    assert found.y.tolist() == [2, 0, 1]

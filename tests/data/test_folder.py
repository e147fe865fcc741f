import hashlib
import sys

import pytest

from layerwise import data
from layerwise.data.folder import MissingDataError, root, shards, verify
from layerwise.data.optional import MissingPackageError
from layerwise.foundations.errors import FileFormatError, InputError, LayerwiseError


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.delenv("LAYERWISE_DATA", raising=False)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("reader", [data.mnist, data.cifar10])
def test_unset_variable_is_named(reader):
    with pytest.raises(MissingDataError, match=r"LAYERWISE_DATA is not set.*export LAYERWISE_DATA="):
        reader()


def test_missing_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(MissingDataError, match="nowhere, which is no folder"):
        root()


def test_argument_comes_before_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERWISE_DATA", str(tmp_path / "nowhere"))
    assert root(tmp_path) == tmp_path


@pytest.mark.parametrize(("reader", "name"), [(data.mnist, "ylecun/mnist"), (data.cifar10, "uoft-cs/cifar10")])
def test_missing_files_come_with_the_command(tmp_path, reader, name):
    with pytest.raises(MissingDataError, match=f"hf download {name} --repo-type dataset --local-dir {tmp_path}"):
        reader(folder=tmp_path)


def test_errors_are_built_in_ones_too(tmp_path):
    with pytest.raises(FileNotFoundError):
        data.mnist(folder=tmp_path)
    with pytest.raises(LayerwiseError):
        data.mnist(folder=tmp_path)


def test_unknown_split_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(InputError, match="Did you mean 'train'"):
        data.mnist("trian", folder=tmp_path)


@pytest.mark.parametrize("place", ["mnist", "mnist/mnist"])
def test_either_place_in_order_of_the_shards(tmp_path, place):
    names = [f"train-{k:05d}-of-00003.parquet" for k in range(3)]
    (tmp_path / place).mkdir(parents=True)
    for name in reversed(names):
        (tmp_path / place / name).touch()
    found = shards(tmp_path, ("mnist", "mnist/mnist"), "train", "someone/mnist")
    assert [path.name for path in found] == names


@pytest.mark.parametrize("present", [["00000-of-00002"], ["00001-of-00002"], ["00000-of-00001", "00000-of-00002"]])
def test_a_missing_shard_is_an_error(tmp_path, present):
    for number in present:
        (tmp_path / f"test-{number}.parquet").touch()
    with pytest.raises(MissingDataError, match="of 2 shards"):
        shards(tmp_path, ("",), "test", "someone/mnist")


def test_checksum_mismatch_shows_both_values(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"given")
    given, wanted = (hashlib.sha256(text).hexdigest() for text in (b"given", b"wanted"))
    with pytest.raises(FileFormatError, match=f"SHA-256 {given}.*SHA-256 {wanted}.*verify=False"):
        verify(path, {"a.parquet": wanted})
    verify(path, {"a.parquet": given})
    verify(path, {"b.parquet": wanted})  # nothing is known about this file


@pytest.mark.parametrize(("module", "package"), [("pyarrow.parquet", "pyarrow"), ("PIL.Image", "pillow")])
def test_missing_package_comes_with_the_command(tmp_path, monkeypatch, module, package):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-00000-of-00001.parquet").touch()
    if package == "pillow":
        pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'layerwise[data]'")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"no usable {package}.*pip install 'layerwise\[data\]'"):
        data.mnist(folder=tmp_path, verify=False)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"scikit-learn, for the digits.*pip install"):
        data.digits()

"""Checkpoints that earlier versions of the library saved go on as they did then."""

import importlib.util
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "earlier_versions"
IN_FLOAT32 = ("muon", "mahalanobis")
"""Their iterations are of single precision whatever the model is (of half on processors that have instructions for
that, but not here), and other processors round otherwise."""
FILES = sorted(HERE.glob("*/*.pt"))
spec = importlib.util.spec_from_file_location("earlier_versions_write", HERE / "write.py")
assert spec is not None
assert spec.loader is not None
write = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write)


def test_there_is_one_of_every_member():
    for version in (folder for folder in HERE.iterdir() if folder.is_dir() and not folder.name.startswith("_")):
        assert {file.stem for file in version.glob("*.pt")} == set(write.MEMBERS), version.name


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_saved_training_goes_on(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("layerwise.optim.newton_schulz.dtype_of_products", lambda device: torch.float32)
    saved = torch.load(file, weights_only=True)
    model = write.network()
    model.load_state_dict(saved["model"])
    opt = write.build(file.stem, model)
    opt.load_state_dict(saved["optimizer"])
    write.go_on(model, opt, write.BEFORE, write.AFTER)
    rtol, atol = (1e-5, 1e-6) if file.stem in IN_FLOAT32 else (1e-7, 1e-9)
    torch.testing.assert_close(dict(model.state_dict()), dict(saved["then"]), rtol=rtol, atol=atol)

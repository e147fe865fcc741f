import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "experiments"))

import toy_descent

from layerwise.experiments import catalog


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A catalog that holds the toy experiment alone, and an empty folder to be in."""
    monkeypatch.setattr(catalog, "experiments", lambda: {toy_descent.EXPERIMENT.name: toy_descent.EXPERIMENT})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAYERWISE_DEBUG", raising=False)
    return toy_descent.EXPERIMENT

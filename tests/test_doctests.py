"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import layerwise

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = ["layerwise", *(m.name for m in pkgutil.walk_packages(layerwise.__path__, "layerwise."))]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=FLAGS)
    assert failed == 0


@pytest.mark.parametrize("name", ["layerwise", "layerwise.curvature.build", "layerwise.foundations.vectors"])
def test_what_users_read_first_has_examples(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=FLAGS).attempted > 0

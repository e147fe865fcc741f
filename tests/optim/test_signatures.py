"""What a user sees who types ``lw.optim.`` and a bracket."""

import inspect
import subprocess
import sys

import pytest
import torch
from optim_tools import mlp

import layerwise as lw

MEMBERS = ("SGD", "Adam", "Sign", "KFAC", "EKFAC", "FOOF", "LocoProp", "NGD", "Shampoo", "SOAP", "Muon")
MEMBERS = (*MEMBERS, "MahalanobisSpectral", "Layerwise")
SAID = {"likelihood": "categorical", "loss_average": "tokens", "overrides": {"*": {"lr": 0.5}}}


@pytest.mark.parametrize("name", MEMBERS)
def test_every_option_stands_in_the_signature(name: str):
    """Each by its name, none behind ``**options``; what is shown can be passed."""
    member = getattr(lw.optim, name)
    for shown in (inspect.signature(member), inspect.signature(member.__init__)):
        kinds = [p.kind for p in shown.parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert {*SAID} <= {*shown.parameters}
        assert "rule" not in shown.parameters or name == "Layerwise"
    shown = inspect.signature(member).parameters
    opt = member(mlp(), **SAID)
    assert opt.param_groups[0]["lr"] == 0.5
    passed = {k: p.default for k, p in shown.items() if p.kind is p.KEYWORD_ONLY}
    again = member(mlp(), **passed)
    assert repr(again) == repr(member(mlp()))


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "NGD", "MahalanobisSpectral"])
def test_type_checkers_see_them_too(name: str):
    """They do not look at what is made at run time: these are written out."""
    code = getattr(lw.optim, name).__init__
    code = getattr(code, "__wrapped__", code).__code__
    assert {*SAID} <= {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="no_such_option"):
        lw.optim.KFAC(mlp(), no_such_option=1)


def test_completion_shows_members_and_no_modules():
    """After everything has been imported and used."""
    opt = lw.optim.SOAP(mlp())
    opt.zero_grad()
    shown = {name for name in dir(lw.optim) if not name.startswith("_")}
    assert shown == {*MEMBERS, "UpdateRule", "SuperNat", "Statistics", "Refresh", "Execution"}
    assert lw.optim.__all__ == sorted(shown)
    assert lw.optim.members.soap.RotatedAdam is type(opt.rule)  # still there for those who know it


def test_everything_can_be_imported_at_once():
    code = "from layerwise.optim import *; assert KFAC.__name__ == 'KFAC' and 'engine' not in dir()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_parameters_are_part_of_the_gradient_members_types():
    hint = inspect.signature(lw.optim.Muon).parameters["model"].annotation
    assert "Iterable" in str(hint)
    assert inspect.signature(lw.optim.KFAC).parameters["model"].annotation is torch.nn.Module

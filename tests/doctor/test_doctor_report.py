"""What a report looks like: on a terminal, as a page, as JSON; and the command."""

import json
import re
import sys

import pytest
import torch
from torch import nn

import layerwise as lw
from layerwise.cli.main import main
from layerwise.doctor import report as report_module

MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    x[:, 0] *= 1000
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), (x, x[:, 1:4].argmax(1))

def make_all():
    model, data = make()
    return model, data, "categorical", torch.optim.SGD(model.parameters(), lr=1e-9)

def one():
    return make()[0]

number = 3
"""


class Named(nn.Module):
    """A layer whose name has to be escaped."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("<b>&", nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, "<b>&")(x)


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    x[:, 0] *= 1000
    return lw.doctor(Named(), (x, x[:, 1:4].argmax(1)), members=("SGD", "KFAC"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "patient_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "patient_module", raising=False)
    return tmp_path


def strict(text: str):
    return json.loads(text, parse_constant=lambda word: pytest.fail(word))


def test_printed(report):
    text = str(report)
    assert text.index("Input features have very different sizes") < text.index("Layers")
    assert "Divide each feature by its standard deviation." in text
    for word in ("κ in", "K-FAC err", "curv %", "KFAC", "SGD", "<b>&"):
        assert word in text
    assert "\x1b" not in text  # no colours where there is no terminal


def test_printed_without_rich(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    text = str(report)
    assert text.startswith("21 parameters in 1 layers")
    assert "1. [severe] Input features" in text
    assert "K-FAC err" in text


def test_long_models_show_the_layers_that_matter():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(26)))
    found = lw.doctor(model, (torch.randn(32, 3), torch.randn(32, 3)), members=())
    shown, left_out = report_module.shown_layers(found)
    assert (len(shown), left_out) == (24, 2)
    assert "2 more layers" in str(found)
    assert [layer.name for layer in shown] == sorted((layer.name for layer in shown), key=int)


def test_json_has_everything(report):
    document = strict(report.to_json())
    assert document["findings"][0]["kind"] == "input-scale"
    (layer,) = document["measured"]["layers"]
    assert layer["inputs"]["condition"] > 1e4
    assert {step["name"] for step in document["measured"]["steps"]} == {"SGD", "KFAC"}


def test_json_of_a_broken_model():
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, float("nan"))
    found = lw.doctor(model, (torch.randn(8, 4), torch.randint(2, (8,))))
    assert [one.kind for one in found.findings] == ["not-finite"]
    assert strict(found.to_json())["measured"]["loss"] == {"float": "nan"}
    assert "not finite" in str(found)


def test_page_needs_nothing_else(report, tmp_path):
    path = report.save_html(tmp_path / "pages" / "doctor.html")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", text)
    assert "url(" not in text
    assert "<script" not in text
    assert "&lt;b&gt;&amp;" in text
    assert "<code>&lt;b&gt;&amp;</code>" in text
    assert "`" not in text
    assert "<b>&" not in text
    assert "prefers-color-scheme: dark" in text
    for finding in report.findings:
        assert finding.kind in text
    assert text.count("<svg") == 3
    assert len(text) < 200_000


def test_page_that_cannot_be_written(report, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(lw.LayerwiseError, match="could not be written"):
        report.save_html(tmp_path / "file" / "doctor.html")


# --- the command ------------------------------------------------------------------------------------------------------


def test_command(package, capsys):
    assert main(["doctor", "patient_module:make", "--seconds", "20", "--html", "out/page.html"]) == 0
    out = capsys.readouterr().out
    assert "Input features have very different sizes" in out
    assert f"page: {package / 'out' / 'page.html'}" in out
    assert (package / "out" / "page.html").is_file()


def test_command_with_likelihood_and_optimizer(package, capsys):
    assert main(["doctor", "patient_module:make_all", "--json"]) == 0
    document = strict(capsys.readouterr().out)
    assert document["measured"]["own_step"]["name"] == "SGD"
    assert document["measured"]["likelihood"] == "categorical"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "0 names"),
        (["a:b", "c:d"], "2 names"),
        (["patient_module"], "with a colon"),
        (["patient_module:mak"], "could not be found"),
        (["no_such_module:make"], "could not be found"),
        (["patient_module:number"], "is a int"),
        (["patient_module:one"], "returned a Sequential"),
        (["patient_module:make", "--seconds", "0"], "seconds=0"),
    ],
)
def test_command_answers_mistakes(package, capsys, words: list[str], said: str):
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err

"""The command line: what it prints, what it returns, and how it answers mistakes."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import toy_descent

from layerwise.cli.main import main
from layerwise.experiments import catalog, runner
from layerwise.experiments.claims import Claim, by_seed
from layerwise.experiments.records import files, read

pytestmark = pytest.mark.usefixtures("toy")
SMOKE = ["run", "toy-descent", "--preset", "smoke"]


def as_json(capsys) -> dict:
    """Standard output is one standard JSON document and nothing else."""
    return json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))


# --- run ----------------------------------------------------------------------------------------------------


def test_run_prints_claims_and_path(capsys):
    assert main(SMOKE) == 0
    out, err = capsys.readouterr()
    assert "Claims of toy-descent, preset smoke: 2 of 2 as expected" in out
    assert "as expected (held)" in out
    assert "as expected (failed)" in out
    assert "A misprint of the paper: The sign was printed wrongly." in out
    path = files(Path("runs"))[0]
    assert f"records: {path} (4 new, 0 kept from before)" in out
    assert "4 of 4" in err  # plain lines of progress, with the time left
    assert "s left" in err
    assert main(SMOKE) == 0
    assert "(0 new, 4 kept from before)" in capsys.readouterr().out


def test_run_json(capsys):
    assert main([*SMOKE, "--json"]) == 0
    document = as_json(capsys)
    assert (document["experiment"], document["new"], document["kept"]) == ("toy-descent", 4, 0)
    assert [(c["claim"], c["status"], c["as_expected"]) for c in document["claims"]] == [
        ("faster", "held", True),
        ("slower", "not held", True),
    ]
    assert Path(document["path"]).exists()


def test_fields_of_the_configuration_are_options(capsys):
    words = [*SMOKE, "--seeds", "3", "--rates", "0.2", "0.3", "0.4", "--steps", "7", "--out", "elsewhere"]
    assert main(words) == 0
    recorded = read(files(Path("elsewhere"))[0])
    assert recorded.manifests[0]["config"] == {
        "seeds": 3,
        "rates": [0.2, 0.3, 0.4],
        "steps": 7,
        "pause": 0.0,
        "fail_at": None,
    }
    assert len(recorded.records) == 9
    assert len(recorded.records[0]["series"]["loss"]) == 8
    assert main(["check", "--out", "elsewhere"]) == 0


def two_experiments(monkeypatch, **changed):
    """A catalog of the toy and of a second one with another configuration of preset smoke."""
    toy = toy_descent.EXPERIMENT
    second = replace(toy, name="second", presets=toy.presets | {"smoke": replace(toy.preset("smoke"), **changed)})
    monkeypatch.setattr(catalog, "experiments", lambda: {"second": second, toy.name: toy})


def test_run_all_runs_every_experiment(capsys, monkeypatch):
    two_experiments(monkeypatch)
    assert main(["run", "all", "--preset", "smoke"]) == 0
    out = capsys.readouterr().out
    assert "Claims of second, preset smoke" in out
    assert "Claims of toy-descent, preset smoke" in out
    assert "2 of 2 experiments ran" in out
    assert len(files(Path("runs"))) == 2
    assert main(["run", "all", "--preset", "smoke", "--json"]) == 0
    document = as_json(capsys)
    assert [(run["experiment"], run["kept"]) for run in document["runs"]] == [("second", 4), ("toy-descent", 4)]
    assert document["failed"] == {}


def test_run_all_goes_on_after_a_failure(capsys, monkeypatch):
    two_experiments(monkeypatch, fail_at=0)
    assert main(["run", "all", "--preset", "smoke"]) == 4
    out, err = capsys.readouterr()
    assert "Claims of toy-descent" in out
    assert "1 of 2 experiments ran" in out
    assert "second" in err
    assert "this seed fails" in err


def test_run_all_with_a_wrong_preset_or_engine_runs_nothing(capsys, monkeypatch):
    two_experiments(monkeypatch)
    assert main(["run", "all", "--preset", "smok"]) == 2
    assert main(["run", "all", "--preset", "smoke", "--engine", "fast"]) == 2
    assert not Path("runs").exists()


def test_run_all_stops_when_it_is_stopped(capsys, monkeypatch):
    two_experiments(monkeypatch)

    def interrupted(*arguments, **options):
        return replace(real(*arguments, **options), interrupted=True)

    real = runner.run
    monkeypatch.setattr(runner, "run", interrupted)
    assert main(["run", "all", "--preset", "smoke"]) == 130
    assert len(files(Path("runs"))) == 1


def test_all_is_a_name_in_the_first_place_only(capsys):
    assert main(["run", "--out", "all", "toy-descent", "--preset", "smoke"]) == 0
    assert len(files(Path("all"))) == 1


def test_run_all_takes_no_option_of_one_experiment(capsys):
    assert main(["run", "all", "--rates", "0.2"]) == 2
    assert main(["run", "all", "--help"]) == 0
    assert "--preset" in capsys.readouterr().out


def test_default_preset_is_laptop():
    assert main(["run", "toy-descent"]) == 0
    assert files(Path("runs"))[0].name.startswith("laptop-")


def test_name_after_the_options(capsys):
    assert main(["run", "--preset", "smoke", "toy-descent"]) == 0


def test_by_reference():
    assert main(["run", "toy_descent:EXPERIMENT", "--preset=smoke"]) == 0
    assert main(["check", "toy_descent:EXPERIMENT"]) == 0


def test_an_experiment_in_the_current_folder(tmp_path):
    """Through the installed module, in a process of its own."""
    source = Path(toy_descent.__file__).read_text().replace('"toy-descent"', '"my-own"')
    (tmp_path / "mine.py").write_text(source)
    import layerwise

    environment = os.environ | {"PYTHONPATH": str(Path(layerwise.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "layerwise", "run", "mine:EXPERIMENT", "--preset", "smoke", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["experiment"] == "my-own"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "toy-decent"], "did you mean 'toy-descent'"),
        (["rnu", "toy-descent"], "did you mean 'run'"),
        (["run", "toy-descent", "--preset", "papr"], "did you mean 'paper'"),
        (["run", "toy-descent", "--engine", "proceses"], "did you mean 'processes'"),
        (["run", "toy-descent", "--sedes", "3"], "--seeds"),
        (["run", "toy-descent", "--seeds", "many"], "seeds"),
        (["run", "toy-descent", "--seeds", "0"], "seeds=0"),
        (["run", "toy-descent", "--address", "auto"], "engine ray"),
        (["run", "no_such_module:EXPERIMENT"], "could not be found"),
        (["run", "--seeds", "3"], "EXPERIMENT [options]"),
        (["run"], "usage: layerwise run"),
        (["check", "toy-decent"], "did you mean 'toy-descent'"),
        (["check", "--outt", "x"], "--out"),
        (["check", "--out", "nowhere"], "nowhere, which is no folder"),
        (["report", "--out", "nowhere"], "nowhere, which is no folder"),
        (["list", "--jsno"], "--json"),
    ],
)
def test_mistakes_exit_2_with_a_hint(capsys, words, expected):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert expected in err
    assert "Traceback" not in err
    assert out == ""
    assert not Path("runs").exists()
    assert main([*words, "--json"]) == 2
    if words != ["run"]:
        assert as_json(capsys)["exit"] == 2


def test_nothing_given(capsys):
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["tyro"])
def test_missing_extra_of_the_command_line(capsys, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(SMOKE) == 2
    assert "pip install 'layerwise[cli]'" in capsys.readouterr().err


def test_missing_ray(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*SMOKE, "--engine", "ray"]) == 2
    assert "pip install 'layerwise[ray]'" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_without_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(SMOKE) == 0


# --- Things that go wrong -----------------------------------------------------------------------------------


def test_full_disk(capsys, monkeypatch):
    real, lines = os.write, []

    def filling(file, data):
        lines.append(data)
        if len(lines) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling)
        assert main(SMOKE) == 2
    assert "make room on the disk" in capsys.readouterr().err
    assert main([*SMOKE, "--json"]) == 0
    assert (lambda d: (d["kept"], d["new"]))(as_json(capsys)) == (2, 2)


def test_read_only_folder(capsys, monkeypatch):
    real = os.open

    def refusing(path, flags, *arguments, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    assert main(SMOKE) == 2
    assert "Read-only file system" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write everywhere")
def test_folder_without_permission(capsys, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    assert main([*SMOKE, "--out", "locked"]) == 2
    assert "--out" in capsys.readouterr().err


def test_corrupt_line(capsys):
    main(SMOKE)
    path = files(Path("runs"))[0]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"cell": "half a li\n', *lines[3:]]))
    capsys.readouterr()
    assert main(["check"]) == 3
    out, err = capsys.readouterr()
    assert "not enough runs (1 of 2)" in out
    assert f"{path}, line 3: damaged" in err
    assert main([*SMOKE, "--json"]) == 0
    document = as_json(capsys)
    assert (document["kept"], document["new"]) == (3, 1)
    assert "line 3" in document["notes"][0]
    assert main(["check"]) == 0


def test_a_run_at_the_same_time(capsys):
    from layerwise.experiments.records import Journal

    main(SMOKE)
    with Journal(files(Path("runs"))[0]):
        assert main(SMOKE) == 2
    assert "another run is writing" in capsys.readouterr().err


def test_failing_experiment(capsys):
    assert main([*SMOKE, "--fail-at", "1"]) == 4
    err = capsys.readouterr().err
    assert "this seed fails" in err
    assert "Traceback" not in err
    assert main([*SMOKE, "--fail-at", "1", "--debug"]) == 4
    assert "Traceback" in capsys.readouterr().err


def test_debug_by_environment(capsys, monkeypatch):
    monkeypatch.setenv("LAYERWISE_DEBUG", "1")
    assert main(["run", "toy-decent"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(capsys, monkeypatch, toy):
    def interrupted(config, cell, seeds):
        for row in toy.run(config, cell, seeds):
            yield row
            raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "experiments", lambda: {toy.name: replace(toy, run=interrupted)})
    assert main(SMOKE) == 130
    err = capsys.readouterr().err
    assert "stopped: 1 of 4 are recorded" in err
    assert "layerwise run toy-descent --preset smoke" in err


# --- check --------------------------------------------------------------------------------------------------


def with_claims(monkeypatch, toy, *claims: Claim) -> None:
    changed = replace(toy, claims=lambda config: list(claims))
    monkeypatch.setattr(catalog, "experiments", lambda: {toy.name: changed})
    monkeypatch.setattr(catalog, "from_reference", lambda reference: changed)


def claim(name: str, target: float, **changes) -> Claim:
    return Claim(
        name=name,
        statement="The loss is small.",
        quantity=lambda records: by_seed(records, "rate/0.5", "loss"),
        relation="<=",
        target=target,
        **changes,
    )


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ([("a", 1e9, 1)], 0),
        ([("a", -1.0, 1)], 1),
        ([("a", 1e9, 9)], 3),
        ([("a", 1e9, 1), ("b", 1e9, 9)], 3),
        ([("a", -1.0, 1), ("b", 1e9, 9)], 1),
    ],
)
def test_exit_codes_of_check(monkeypatch, toy, capsys, claims, code):
    main(SMOKE)
    with_claims(monkeypatch, toy, *(claim(name, target, seeds=seeds) for name, target, seeds in claims))
    capsys.readouterr()
    assert main(["check", "--json"]) == code
    document = as_json(capsys)
    assert document["exit"] == code
    assert len(document["runs"][0]["claims"]) == len(claims)
    assert main(["check"]) == code
    assert ("NOT as expected" in capsys.readouterr().out) == (code == 1)


def test_an_error_that_does_not_show_is_not_as_expected(monkeypatch, toy):
    main(SMOKE)
    with_claims(monkeypatch, toy, claim("a", 1e9, expected="fails", why="misprint"))
    assert main(["check"]) == 1


def test_check_without_runs(capsys):
    assert main(["check"]) == 3
    assert "no records in runs" in capsys.readouterr().out
    assert main(["check", "toy-descent", "--json"]) == 3
    assert as_json(capsys)["not_run"] == ["toy-descent"]


def test_records_that_nobody_declared(capsys):
    main(SMOKE)
    strange = Path("runs/strange/smoke-00000000.jsonl")
    strange.parent.mkdir()
    strange.write_text("{}\n")
    capsys.readouterr()
    assert main(["check"]) == 2
    out, err = capsys.readouterr()
    assert "2 of 2 as expected" in out  # the others are still judged
    assert str(strange) in err


# --- list, report, help -------------------------------------------------------------------------------------


def test_list(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("toy-descent: Gradient descent on a quadratic\n")
    for word in ("Nobody 2025", "Figure 0", "2 of preset paper", "less than a second", "not run"):
        assert word in out
    main(SMOKE)
    capsys.readouterr()
    assert main(["list"]) == 0
    assert "smoke: 2 of 2 as expected" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    (row,) = as_json(capsys)["experiments"]
    assert row["claims"] == {"smoke": 2, "laptop": 2, "paper": 2}
    assert row["state"][0]["preset"] == "smoke"


def test_report_prints_the_path(capsys, monkeypatch, tmp_path):
    import layerwise.report

    asked = []

    def write(runs: Path, out: Path) -> Path:
        asked.append((runs, out))
        return out / "index.html"

    monkeypatch.setattr(layerwise.report, "write", write)
    assert main(["report"]) == 0
    assert f"report: {tmp_path / 'report' / 'index.html'}" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    assert main(["report", "--out", "other", "--to", "pages", "--json"]) == 0
    assert as_json(capsys) == {"index": str(tmp_path / "pages" / "index.html")}
    assert asked == [(Path("runs"), Path("report")), (Path("other"), Path("pages"))]


def test_help_teaches(capsys):
    assert main(["--help"]) == 0
    assert "examples:" in capsys.readouterr().out
    assert main(["run", "--help"]) == 0
    assert "layerwise run toy-descent --seeds 10" in capsys.readouterr().out
    assert main(["run", "toy-descent", "--help", "--preset", "paper"]) == 0
    out = capsys.readouterr().out
    for word in ("--seeds INT", "--rates", "Learning rates that are swept", "(default: 20)", "Nobody 2025"):
        assert word in out
    for command in ("list", "check", "report"):
        assert main([command, "--help"]) == 0
        assert "--out" in capsys.readouterr().out


def test_a_setting_named_like_an_option_is_refused(monkeypatch, toy, capsys):
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Clash:
        seeds: int = 1
        out: int = 3

    clashing = replace(toy, presets=dict.fromkeys(("smoke", "laptop", "paper"), Clash()))
    monkeypatch.setattr(catalog, "experiments", lambda: {toy.name: clashing})
    assert main(SMOKE) == 2
    assert "settings out" in capsys.readouterr().err


def test_closed_pipe():
    import layerwise

    environment = os.environ | {"PYTHONPATH": str(Path(layerwise.__file__).parents[1])}
    command = f"{sys.executable} -m layerwise --help | true"
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr

"""The command line: what it prints, what it returns, and how it answers mistakes."""

import errno
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import toy_descent
from bad_values import BAD_VALUES

from error_sentences import WORDED
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


def test_a_folder_of_the_catalog_runs_what_is_in_it(capsys, monkeypatch):
    two_experiments(monkeypatch)
    monkeypatch.setattr(catalog, "folders", lambda: {"thesis2023": ("second",)})
    assert main(["run", "thesis2023", "--preset", "smoke"]) == 0
    out = capsys.readouterr().out
    assert "Claims of second" in out
    assert "toy-descent" not in out
    assert "1 of 1 experiments ran" in out


def test_the_cost_of_preset_paper_is_said_before_it_starts(capsys):
    assert main(["run", "toy-descent", "--preset", "paper", "--steps", "2"]) == 0
    err = capsys.readouterr().err
    cost = "toy-descent: 4 cells, 5 seeds each, on cpu"
    assert err.startswith(cost)
    assert main(SMOKE) == 0
    assert cost not in capsys.readouterr().err


def test_a_device_that_is_not_there(capsys):
    where = "layerwise.experiments.george2023.autoencoder:EXPERIMENT"
    assert main(["run", where, "--preset", "smoke", "--device", "cuda:99"]) == 2
    assert "Got device='cuda:99', which cannot be used here" in capsys.readouterr().err
    assert not Path("runs").exists()


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
        (["run", "toy-decent"], "Did you mean 'toy-descent'"),
        (["rnu", "toy-descent"], "Did you mean 'run'"),
        (["run", "toy-descent", "--preset", "papr"], "Did you mean 'paper'"),
        (["run", "toy-descent", "--engine", "proceses"], "Did you mean 'processes'"),
        (["run", "toy-descent", "--sedes", "3"], "--seeds"),
        (["run", "toy-descent", "--seeds", "many"], "seeds"),
        (["run", "toy-descent", "--seeds", "0"], "seeds=0"),
        (["run", "toy-descent", "--steps", "0"], "Got steps=0. Expected an integer ≥ 1. "),
        (["run", "toy-descent", "--rates", "nan"], "Got rates=nan. Expected a finite number > 0. "),
        (["run", "toy-descent", "--address", "auto"], "engine ray"),
        (["run", "no_such_module:EXPERIMENT"], "could not be found"),
        (["run", "--seeds", "3"], "EXPERIMENT [options]"),
        (["run"], "usage: layerwise run"),
        (["check", "toy-decent"], "Did you mean 'toy-descent'"),
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
    assert "Make room on the disk" in capsys.readouterr().err
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
    assert main([*SMOKE, "--fail-at", "0"]) == 4  # before anything was recorded: no file that `check` would count
    assert len(files(Path("runs"))) == 1
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


def test_seeds_that_agree_are_not_as_expected(capsys, monkeypatch, toy):
    def seedless(config, cell, seeds):
        (row,) = toy.run(config, cell, [0])
        return [replace(row, seed=seed) for seed in seeds]

    monkeypatch.setattr(catalog, "experiments", lambda: {toy.name: replace(toy, run=seedless)})
    sentence = "rate/0.1: seeds 0 and 1 gave bitwise equal results: is the seed used?"
    assert main(SMOKE) == 0
    assert sentence in capsys.readouterr().out
    assert main([*SMOKE, "--json"]) == 0
    assert sentence in as_json(capsys)["repeats"]
    assert main(["check"]) == 1
    assert f"NOT as expected: {sentence}" in capsys.readouterr().out
    assert main(["check", "--json"]) == 1
    assert sentence in as_json(capsys)["runs"][0]["repeats"]
    assert main(["list"]) == 0
    assert "equal seeds" in capsys.readouterr().out


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


def test_a_preset_of_which_nothing_is_claimed_does_not_pass(monkeypatch, toy, capsys):
    main(SMOKE)
    with_claims(monkeypatch, toy)
    capsys.readouterr()
    assert main(["check"]) == 3
    assert "No claims are made of toy-descent, preset smoke" in capsys.readouterr().out
    assert main(["list"]) == 0
    assert "no claims are made of preset smoke" in capsys.readouterr().out


def test_a_claim_that_cannot_be_judged_is_bad_input(monkeypatch, toy, capsys):
    main(SMOKE)
    broken = replace(claim("broken", 1e9), quantity=lambda records: 1 / 0)
    with_claims(monkeypatch, toy, claim("a", 1e9), broken)
    capsys.readouterr()
    assert main(["check"]) == 2
    out, err = capsys.readouterr()
    assert "as expected (held)" in out  # the other is still judged
    assert "claim 'broken'" in err
    assert str(files(Path("runs"))[0]) in err


# --- One's own experiments ----------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path, toy):
    """A module in the current folder, whose records are there, and which no test has imported."""
    source = Path(toy_descent.__file__).read_text().replace('"toy-descent"', '"my-own"')
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "mean.py").write_text(source)
    assert main(["run", "my_package.mean:EXPERIMENT", "--preset", "smoke"]) == 0
    yield "my_package.mean:EXPERIMENT"
    for name in ("my_package", "my_package.mean"):
        sys.modules.pop(name, None)


def test_own_experiments_are_checked_listed_and_reported(own, capsys):
    capsys.readouterr()
    assert main(["check", own]) == 0
    assert "Claims of my-own, preset smoke: 2 of 2 as expected" in capsys.readouterr().out
    assert main(["list", own]) == 0
    out = capsys.readouterr().out
    assert out.startswith("my-own: ")
    assert "smoke: 2 of 2 as expected" in out
    assert "toy-descent" not in out
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'layerwise[report]'")
    assert main(["report", own]) == 0
    assert "A larger rate goes down faster." in Path("report/my-own/index.html").read_text()
    assert not Path("report/toy-descent").exists()
    assert main(["report", "all", own, "--to", "both"]) == 0
    assert Path("both/my-own").exists()
    assert Path("both/toy-descent").exists()


def test_own_experiments_that_nobody_asked_for_are_only_named(own, capsys):
    for name in ("my_package", "my_package.mean"):
        sys.modules.pop(name, None)
    main(SMOKE)
    capsys.readouterr()
    assert main(["check"]) == 0  # all that was asked for is as expected
    out, err = capsys.readouterr()
    assert "my-own" not in out
    path = files(Path("runs"), "my-own")[0]
    assert f"{path} is of {own}, which is not part of layerwise; judge it with `layerwise check {own}`" in err
    assert main(["check", "--json"]) == 0
    assert own in as_json(capsys)["not_judged"][0]
    assert main(["list"]) == 0
    assert own in capsys.readouterr().err
    assert "my_package.mean" not in sys.modules
    assert main(["check", "--help"]) == 0
    assert "never imported" in capsys.readouterr().out


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
    assert "Nobody 2025\n  toy-descent  Gradient descent on a quadratic\n" in out
    assert main(["list", "all"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("toy-descent: Gradient descent on a quadratic\n")
    for word in ("Nobody 2025", "Figure 0", "2 of preset paper", "less than a second", "not run"):
        assert word in out
    main(SMOKE)
    capsys.readouterr()
    assert main(["list"]) == 0
    assert "a quadratic [smoke: 2 of 2 as expected]" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    (row,) = as_json(capsys)["experiments"]
    assert row["claims"] == {"smoke": 2, "laptop": 2, "paper": 2}
    assert row["state"][0]["preset"] == "smoke"


def test_report_prints_the_path(capsys, monkeypatch, tmp_path):
    import layerwise.report

    asked = []

    def write(runs: Path, out: Path, experiments=None, files=False) -> Path:
        asked.append((runs, out, files))
        return out / "index.html"

    monkeypatch.setattr(layerwise.report, "write", write)
    assert main(["report"]) == 0
    assert f"report: {tmp_path / 'report' / 'index.html'}" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    assert main(["report", "--out", "other", "--to", "pages", "--files", "--json"]) == 0
    assert as_json(capsys) == {"index": str(tmp_path / "pages" / "index.html")}
    assert asked == [(Path("runs"), Path("report"), False), (Path("other"), Path("pages"), True)]


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


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["list"], ["check"], ["run", "--help"]])
def test_commands_that_compute_nothing_import_no_torch(words):
    """Torch alone takes seconds to import; in a process of its own, with the whole catalog."""
    import layerwise

    code = (
        f"import sys; from layerwise.cli.main import main; code = main({words!r}); "
        "heavy = [name for name in ('torch', 'jaxtyping', 'matplotlib', 'rich') if name in sys.modules]; "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(layerwise.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (3 if words == ["check"] else 0), done.stderr


@pytest.mark.parametrize("name", ["head-to-head", "lower-bound", "networks", "samples", "real-data"])
def test_recorded_runs_are_judged_without_torch(name, tmp_path):
    """Records of one seed that has nothing in it: claims lack runs, and say so, without anything to compute with."""
    import layerwise
    from layerwise.experiments.experiment import digest
    from layerwise.experiments.manifest import manifest
    from layerwise.experiments.records import Journal, path_of

    experiment = catalog.from_reference(f"layerwise.experiments.{MODULES[name]}:EXPERIMENT")
    config = experiment.preset("laptop")
    path = path_of(tmp_path / "runs", name, "laptop", digest(name, config))
    with Journal(path) as journal:
        journal.append([manifest(experiment, catalog.reference_to(experiment), config, "laptop", [0], {})])
    code = (
        "import sys; from layerwise.cli.main import main; code = main(['check']); "
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(layerwise.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "not enough runs" in done.stdout


MODULES = {
    "head-to-head": "zhang2025.head_to_head",
    "lower-bound": "zhang2025.lower_bound",
    "networks": "beyond.networks",
    "samples": "beyond.samples",
    "real-data": "beyond.real_data",
}


@pytest.mark.parametrize("which", ["one each", pytest.param("all", marks=pytest.mark.slow)])
def test_bad_values_of_every_experiment_exit_2_and_leave_nothing(which, capsys, monkeypatch):
    monkeypatch.undo()  # the catalog itself
    monkeypatch.delenv("LAYERWISE_DEBUG", raising=False)
    assert set(BAD_VALUES) == set(catalog.experiments())
    for place, (name, mistakes) in enumerate(BAD_VALUES.items()):
        for words in mistakes if which == "all" else [mistakes[place % len(mistakes)]]:
            assert main(["run", name, "--preset", "smoke", "--out", "nowhere", *words]) == 2, (name, words)
            err = capsys.readouterr().err
            assert re.match(f"layerwise: {WORDED}", err.strip()), (name, words, err)
            assert err.count("\n") == 1, (name, words, err)
            assert not Path("nowhere").exists(), (name, words)


def test_sigterm_says_how_to_go_on_and_ends_the_workers(tmp_path):
    """As a cluster ends a job: what is finished is kept, exit code 143, no orphans."""
    import layerwise

    here = Path(toy_descent.__file__).parent
    path = os.pathsep.join([str(Path(layerwise.__file__).parents[1]), str(here)])
    words = ["run", "toy_descent:EXPERIMENT", "--preset", "smoke", "--seeds", "6", "--pause", "0.3"]
    words += ["--engine", "processes", "--workers", "2"]
    runner = subprocess.Popen(
        [sys.executable, "-m", "layerwise", *words],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(read(path).records for path in files(Path("runs"))):
        time.sleep(0.05)
    children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
    workers = [int(word) for word in children.read_text().split()] if children.exists() else []
    runner.terminate()
    err = runner.communicate(timeout=60)[1]
    assert runner.returncode == 143, err
    assert "of 12 are recorded" in err
    assert f"layerwise run {' '.join(words[1:])}" in err
    assert "Traceback" not in err
    while time.monotonic() < deadline and any(Path(f"/proc/{worker}").exists() for worker in workers):
        time.sleep(0.05)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    kept = len(read(files(Path("runs"))[0]).records)
    assert 0 < kept < 12


def test_closed_pipe():
    import layerwise

    environment = os.environ | {"PYTHONPATH": str(Path(layerwise.__file__).parents[1])}
    command = f"{sys.executable} -m layerwise --help | true"
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_fresh_seeds_are_run_from_the_first_that_is_asked_for(capsys, tmp_path):
    assert main([*SMOKE, "--first-seed", "1000", "--out", str(tmp_path / "fresh")]) == 0
    (path,) = (tmp_path / "fresh").glob("*/*.jsonl")
    assert {record["seed"] for record in read(path).records} == {1000, 1001}
    assert main(["check", "toy-descent", "--out", str(tmp_path / "fresh")]) == 0
    capsys.readouterr()
    assert main([*SMOKE, "--first-seed", "-1"]) == 2
    assert "first seed -1" in capsys.readouterr().err

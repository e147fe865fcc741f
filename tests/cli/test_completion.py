"""`layerwise completion`: the script of bash in a real bash, and what the others hold."""

import shutil
import subprocess

import pytest

from layerwise.cli.completion import SHELLS, flags
from layerwise.cli.main import COMMANDS, main
from layerwise.cli.run import RunOptions
from layerwise.experiments import catalog


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    from layerwise.cli.completion import bash

    path = tmp_path_factory.mktemp("completion") / "layerwise.bash"
    path.write_text(bash(), encoding="utf-8")
    return path


def completed(script, *words: str) -> list[str]:
    """What bash offers for the last of some words."""
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    line = " ".join(f"'{word}'" for word in ("layerwise", *words))
    code = f'. "{script}"; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _layerwise; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_commands(script):
    assert set(COMMANDS) <= set(completed(script, ""))
    assert completed(script, "che") == ["check"]


def test_experiments_presets_and_options(script):
    assert completed(script, "run", "head-to") == ["head-to-head"]
    assert "zhang2025" in completed(script, "check", "zh")
    assert completed(script, "run", "head-to-head", "--preset", "") == ["smoke", "laptop", "paper"]
    assert completed(script, "run", "head-to-head", "--engine", "p") == ["processes"]
    assert completed(script, "completion", "") == list(SHELLS)


def test_options_of_an_experiment_are_its_fields(script):
    own = flags(catalog.find("head-to-head").presets["laptop"])
    offered = completed(script, "run", "head-to-head", "--")
    assert set(own) | set(flags(RunOptions())) <= set(offered)
    assert own[1] not in completed(script, "check", "head-to-head", "--")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell, capsys):
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert "head-to-head" in said
    assert "--preset" in said or "-l preset" in said


def test_options_of_the_script_are_options_of_the_command(capsys):
    """Names are made from fields as tyro makes them."""
    assert main(["run", "head-to-head", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in flags(catalog.find("head-to-head").presets["laptop"]):
        assert option in shown, option


def test_another_shell_is_refused(capsys):
    assert main(["completion", "powershell"]) == 2
    assert "bash, fish, zsh" in capsys.readouterr().err
    assert main(["completion"]) == 2

"""`layerwise completion`: a script that completes commands, experiments and their options in a shell."""

import dataclasses

from layerwise.cli import exits
from layerwise.cli.check import CheckOptions
from layerwise.cli.doctor import DoctorOptions
from layerwise.cli.listing import ListOptions
from layerwise.cli.named import ALL
from layerwise.cli.report import ReportOptions
from layerwise.cli.run import RunOptions
from layerwise.experiments import catalog
from layerwise.experiments.experiment import PRESETS
from layerwise.foundations.errors import NameLookupError, unknown

HELP = """\
usage: layerwise completion SHELL

Print a script that completes commands, experiments, presets and options. It holds the names of this version: print it
again after an update.

examples:
  layerwise completion bash > ~/.local/share/bash-completion/completions/layerwise
  layerwise completion zsh >> ~/.zshrc
  layerwise completion fish > ~/.config/fish/completions/layerwise.fish
"""
COMMANDS = {
    "list": ListOptions,
    "run": RunOptions,
    "report": ReportOptions,
    "check": CheckOptions,
    "doctor": DoctorOptions,
}
OF_EXPERIMENTS = ("list", "run", "report", "check")
"""Commands that take names of experiments."""
SHELLS = ("bash", "zsh", "fish")
VALUES = {"--preset": PRESETS, "--engine": ("batched", "processes", "ray")}
FOLDERS = ("--out", "--to", "--html")


def completion(argv: list[str]) -> int:
    """Print the script of a shell."""
    if not argv or argv[0] in ("--help", "-h"):
        print(HELP, end="")
        return exits.OK if argv else exits.BAD_INPUT
    if argv[0] not in SHELLS:
        raise NameLookupError(unknown("shell", argv[0], SHELLS))
    print(fish() if argv[0] == "fish" else bash(zsh=argv[0] == "zsh"))
    return exits.OK


def flags(config: object) -> list[str]:
    """The options that a dataclass becomes on the command line, those of dataclasses inside it included.

    >>> flags(CheckOptions())
    ['--out', '--json']
    """
    found: list[str] = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        inside = dataclasses.is_dataclass(value) and not isinstance(value, type)
        found += flags(value) if inside else [f"--{field.name.replace('_', '-')}"]
    return found


def names() -> list[str]:
    """What may be run, reported or checked: experiments, folders of them, and all."""
    return [ALL, *catalog.folders(), *catalog.experiments()]


def bash(*, zsh: bool = False) -> str:
    """For bash; zsh reads the same with its own compatibility layer."""
    top = " ".join([*COMMANDS, "completion", "--help", "--version"])
    values = "\n".join(f'        {option}) words="{" ".join(known)}" ;;' for option, known in VALUES.items())
    own = "\n".join(f'        {name}) own="{" ".join(options)}" ;;' for name, options in _own().items())
    commands = "\n".join(
        f'        {command}) words="{"$names " * (command in OF_EXPERIMENTS)}{" ".join(flags(options()))} --help" ;;'
        for command, options in COMMANDS.items()
    )
    script = f"""\
_layerwise() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words="" own=""
    local names="{" ".join(names())}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{top}" -- "$current"))
        return
    fi
    case "$previous" in
        {"|".join(FOLDERS)}) COMPREPLY=($(compgen -d -- "$current")); return ;;
{values}
    esac
    if [ -z "$words" ]; then case "${{COMP_WORDS[1]}}" in
{commands}
        completion) words="{" ".join(SHELLS)}" ;;
    esac; fi
    if [ "${{COMP_WORDS[1]}}" = run ] && [[ "$current" == -* ]]; then case "${{COMP_WORDS[2]}}" in
{own}
    esac; fi
    COMPREPLY=($(compgen -W "$words $own" -- "$current"))
}}
complete -F _layerwise layerwise"""
    return "autoload -U +X bashcompinit && bashcompinit\n" + script if zsh else script


def fish() -> str:
    """For fish."""
    first = "not __fish_seen_subcommand_from " + " ".join([*COMMANDS, "completion"])
    lines = ["complete -c layerwise -f"]
    lines += [f"complete -c layerwise -n '{first}' -a '{command}'" for command in (*COMMANDS, "completion")]
    lines.append(f"complete -c layerwise -n '__fish_seen_subcommand_from completion' -a '{' '.join(SHELLS)}'")
    known = " ".join(names())
    for command, options in COMMANDS.items():
        seen = f"__fish_seen_subcommand_from {command}"
        if command in OF_EXPERIMENTS:
            lines.append(f"complete -c layerwise -n '{seen}' -a '{known}'")
        for option in flags(options()):
            values = f" -x -a '{' '.join(VALUES[option])}'" if option in VALUES else ""
            folder = " -r -F" if option in FOLDERS else ""
            lines.append(f"complete -c layerwise -n '{seen}' -l {option.removeprefix('--')}{values}{folder}")
    for name, own in _own().items():
        seen = f"__fish_seen_subcommand_from run; and __fish_seen_subcommand_from {name}"
        lines += [f"complete -c layerwise -n '{seen}' -l {option.removeprefix('--')}" for option in own]
    return "\n".join(lines)


def _own() -> dict[str, list[str]]:
    """The options of each experiment."""
    return {name: flags(experiment.presets["laptop"]) for name, experiment in catalog.experiments().items()}

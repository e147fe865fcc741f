"""`layerwise`: which command, and how errors end: one clear message and an exit code, no traceback."""

import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from layerwise.cli import exits
from layerwise.foundations.errors import LayerwiseError, NameLookupError, unknown

COMMANDS = {
    "list": ("layerwise.cli.listing", "list_experiments"),
    "run": ("layerwise.cli.run", "run"),
    "report": ("layerwise.cli.report", "report"),
    "check": ("layerwise.cli.check", "check"),
    "doctor": ("layerwise.cli.doctor", "doctor"),
    "completion": ("layerwise.cli.completion", "completion"),
}
"""Where each command is: imported when it is called, so that `--version` and `--help` answer at once."""

HELP = """\
usage: layerwise COMMAND [options]

Experiments of the papers that layerwise implements: run them, and see which claims hold.

commands:
  list      what there is: paper, figure, claims, cost, and what has been run
  run       run an experiment, or go on where it stopped
  report    an HTML page for every experiment: figures, claims, how to reproduce
  check     judge every claim of every recorded run
  doctor    what holds the training of a model of yours back, layer by layer
  completion   a script for your shell that completes all of this (bash, zsh, fish)

examples:
  layerwise list
  layerwise run head-to-head --preset smoke        seconds: does it work here?
  layerwise run head-to-head                       minutes: preset laptop
  layerwise run head-to-head --seeds 10            ten seeds; those that ran before are kept
  layerwise run head-to-head --help                all settings of this experiment
  layerwise run all --preset paper                 every experiment, one after the other
  layerwise report                                 then open the page whose path is printed
  layerwise check --json | python -m json.tool     for machines
  layerwise doctor my_package.train:make           a function that returns (model, data)
  layerwise run my_package.mean:EXPERIMENT         one of your own; also after check, report and list

options:
  --help      this text; also after a command
  --version   the version
  --debug     show the traceback of an error (or set LAYERWISE_DEBUG=1)

exit codes:
  0    done; `check`: every claim is as expected
  1    `check`: some claim is not as expected, or seeds gave bitwise equal results
  2    something to put right: the message says what
  3    `check`: not enough runs to say, or nothing is claimed of a preset
  4    the experiment failed while it ran
  130  stopped by Ctrl-C; the same command goes on
  143  stopped by SIGTERM; the same command goes on
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    >>> main(["--version"])
    layerwise ...
    0
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in argv or bool(os.environ.get("LAYERWISE_DEBUG"))
    argv = [word for word in argv if word != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ≤ shows a question mark instead
    try:
        return _dispatch(argv)
    except LayerwiseError as error:
        return _explain(error, argv, debug)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return exits.INTERRUPTED
    except BrokenPipeError:  # `layerwise list | head`
        sys.stdout = None
        return exits.OK
    except SystemExit as stop:  # the parser of options has said what is wrong
        code = stop.code if isinstance(stop.code, int) else exits.BAD_INPUT if stop.code else exits.OK
        if code and "--json" in argv:
            print(json.dumps({"error": "options that cannot be read; see standard error", "exit": code}))
        return code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(HELP, end="")
        return exits.OK if argv else exits.BAD_INPUT
    if argv[0] == "--version":
        from layerwise import __version__

        print(f"layerwise {__version__}")
        return exits.OK
    if argv[0] not in COMMANDS:
        raise NameLookupError(unknown("command", argv[0], COMMANDS))
    module, function = COMMANDS[argv[0]]
    command: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return command(argv[1:])


def _explain(error: LayerwiseError, argv: list[str], debug: bool) -> int:
    from layerwise.experiments.tasks import CellError

    code = exits.FAILED if isinstance(error, CellError) else exits.BAD_INPUT
    if debug:
        traceback.print_exception(error)
    print(f"layerwise: {error}", file=sys.stderr)
    if "--json" in argv:
        print(json.dumps({"error": str(error), "exit": code}, ensure_ascii=False))
    return code

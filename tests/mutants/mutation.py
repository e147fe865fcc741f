"""`make mutants`: break an algorithm on purpose, one line at a time, and see whether the claims notice.

A mutant is an entry of a ``*.toml`` file beside this one: a file, a piece of text that occurs once in it, and what
replaces it. It is applied to a copy of ``src``; then the experiments that it names are run and judged there, first with
their preset smoke and, if that notices nothing, with preset laptop. A mutant is noticed if a claim is not as expected,
or if the run fails. Before that, the same experiments must be as expected on the tree as it is.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WANTED = {"smoke": 0.60, "laptop": 0.95}
"""The share of all mutants that must be noticed: by smoke presets alone, and by smoke and laptop together."""
SECONDS = {"smoke": 300, "laptop": 1800}
"""After which an experiment of a mutant counts as failed: a loop that does not end is noticed too."""
CHILD = """
import contextlib, io, json, sys
from layerwise.cli.main import main
name, preset, out = sys.argv[1:]
with contextlib.redirect_stdout(io.StringIO()):
    ran = main(["run", name, "--preset", preset, "--out", out])
text = io.StringIO()
with contextlib.redirect_stdout(text):
    judged = main(["check", name, "--out", out, "--json"]) if ran == 0 else None
runs = json.loads(text.getvalue())["runs"] if ran == 0 else []
claims = [claim["claim"] for run in runs for claim in run["claims"] if claim["as_expected"] is False]
print(json.dumps({"run": ran, "check": judged, "claims": claims}))
"""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One breakage, and who must notice it."""

    name: str
    breaks: str
    """What is wrong with it, in a sentence."""
    file: str
    old: str
    new: str
    smoke: tuple[str, ...] = ()
    """Experiments whose preset smoke must notice."""
    laptop: tuple[str, ...] = ()
    """Experiments whose preset laptop must notice, where smoke does not."""
    unnoticed: str = ""
    """Why nothing notices it, if nothing does."""


@dataclass
class Outcome:
    """Who noticed a mutant, and by which claims."""

    mutant: Mutant
    noticed: dict[str, str] = field(default_factory=dict)
    """From preset to what noticed: an experiment and its claims, or how it failed."""
    trouble: str = ""


def load(folder: Path = HERE) -> list[Mutant]:
    """All mutants of the folder's files, in the order of their names."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            lists = {preset: tuple(entry.pop(preset, ())) for preset in WANTED}
            found.append(Mutant(**entry, **lists))
    return found


def broken(mutant: Mutant, text: str) -> str:
    """The text of the mutant's file with its breakage; an entry that fits no more is an error."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"mutant {mutant.name!r}: its text occurs {count} times in {mutant.file}, expected once")
    return text.replace(mutant.old, mutant.new)


def copied(folder: Path, mutant: Mutant | None) -> Path:
    """A copy of ``src`` in the folder, with the breakage."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        path = folder / mutant.file
        path.write_text(broken(mutant, path.read_text()))
    return source


def judged(source: Path, experiment: str, preset: str, out: Path) -> tuple[bool, str]:
    """Run and check one experiment with the code in `source`: whether all is as expected, and what is not."""
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, experiment, preset, str(out)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS[preset], check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"{experiment}: took longer than {SECONDS[preset]} s"
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return False, f"{experiment}: failed ({last[0][:80]})"
    if answer["run"] != 0:
        return False, f"{experiment}: the run ended with exit code {answer['run']}"
    if answer["check"] == 1:
        return False, f"{experiment}: {', '.join(answer['claims']) or 'seeds alike'}"
    # Exit code 3 (not enough runs) decides nothing: it does not count as noticed.
    return True, "" if answer["check"] == 0 else f"{experiment}: check ended with exit code {answer['check']}"


def attempt(mutant: Mutant, presets: Sequence[str]) -> Outcome:
    """Break the code and ask the experiments that the mutant names, preset by preset, until one notices."""
    outcome = Outcome(mutant)
    with tempfile.TemporaryDirectory() as folder:
        try:
            source = copied(Path(folder), mutant)
        except (ValueError, OSError) as error:
            outcome.trouble = str(error)
            return outcome
        for preset in presets:
            for experiment in getattr(mutant, preset):
                sound, words = judged(source, experiment, preset, Path(folder) / f"runs-{preset}")
                if not sound:
                    outcome.noticed[preset] = words
                    break
            if outcome.noticed:
                break
    return outcome


def baseline(mutants: Sequence[Mutant], presets: Sequence[str], jobs: int) -> list[str]:
    """What is not as expected without any breakage: then nothing that follows means anything."""
    asked = sorted({(preset, name) for m in mutants for preset in presets for name in getattr(m, preset)})
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        source = copied(Path(folder), None)
        results = pool.map(lambda pair: judged(source, pair[1], pair[0], Path(folder) / f"runs-{pair[0]}"), asked)
        return [f"{preset}: {words}" for (preset, _), (_, words) in zip(asked, results, strict=True) if words]


def report(outcomes: Sequence[Outcome], presets: Sequence[str]) -> int:
    """Print the table and the shares; 1 if a share is too small, or a mutant is not noticed by whom it names."""
    width = max(len(outcome.mutant.name) for outcome in outcomes)
    failed = []
    for outcome in outcomes:
        mutant = outcome.mutant
        words = "; ".join(f"{preset}: {by}" for preset, by in outcome.noticed.items())
        named = [preset for preset in presets if getattr(mutant, preset)]
        if outcome.trouble:
            failed.append(outcome.trouble)
        elif named and named[0] not in outcome.noticed:
            failed.append(f"{mutant.name}: preset {named[0]} does not notice, though it is named")
        print(f"{mutant.name:<{width}}  {mutant.breaks}")
        print(f"{'':<{width}}  -> {words or mutant.unnoticed or 'NOT NOTICED'}")
    total, code = len(outcomes), 0
    for upto, preset in enumerate(presets, start=1):
        count = sum(any(p in outcome.noticed for p in presets[:upto]) for outcome in outcomes)
        enough = count >= WANTED[preset] * total
        code |= not enough
        print(
            f"{' and '.join(presets[:upto])}: {count} of {total} noticed ({100 * count / total:.0f} %), "
            f"wanted {100 * WANTED[preset]:.0f} %{'' if enough else ': TOO FEW'}"
        )
    for words in failed:
        print(f"not as declared: {words}")
    return 1 if failed or code else 0


def main() -> int:
    """Read the options, check the tree as it is, then every mutant."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to try; all if none is named")
    parser.add_argument("--presets", nargs="+", default=list(WANTED), choices=list(WANTED))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants tried at once")
    options = parser.parse_args()
    known = {mutant.name: mutant for mutant in load()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown mutant {', '.join(unknown)}; known are {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(known.values())
    if troubles := baseline(chosen, options.presets, options.jobs):
        print("not as expected without any breakage:\n  " + "\n  ".join(troubles))
        return 2
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, outcome in enumerate(pool.map(lambda m: attempt(m, options.presets), chosen), start=1):
            outcomes.append(outcome)
            said = ", ".join(outcome.noticed) or outcome.trouble or "not noticed"
            print(f"{number} of {len(chosen)}: {outcome.mutant.name}: {said}", file=sys.stderr, flush=True)
    return report(outcomes, options.presets)


if __name__ == "__main__":
    sys.exit(main())

"""One page an experiment, written from the catalog before each build: what is asked, what is claimed, what to type.

Pages go into ``docs/experiments``, which is not committed. Results are not theirs to show: those are in the report that
`layerwise report` makes of records, which the build puts beside the site for the experiments that it has run.
"""

import textwrap
from collections import defaultdict
from pathlib import Path

from sphinx.application import Sphinx

from layerwise.experiments import catalog
from layerwise.experiments.claims import ORIGINS, Claim
from layerwise.experiments.experiment import Experiment, plain
from layerwise.report import write as write_report

DOCS = Path(__file__).parents[1]
FOLDER, RUNS = DOCS / "experiments", DOCS / "_build" / "runs"
SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>|$#~"})


def written(text: str) -> str:
    """Plain text as Markdown that shows it, on one line."""
    return " ".join(text.split()).translate(SPECIAL)


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def claim_row(claim: Claim) -> list[str]:
    """A claim, who makes it and how it is decided."""
    target = claim.target if isinstance(claim.target, tuple) else (claim.target,)
    bound = " to ".join(f"{float(number):.4g}" for number in target)
    tested = {"every seed": "every seed", "mean": "the mean", "share": f"{claim.share:.0%} of the seeds"}[claim.test]
    said = written(claim.statement)
    if claim.expected == "fails":
        said += f" **Known to fail**: {written(claim.why)}"
    who = ORIGINS[claim.origin] + (f", {claim.source}" if claim.source else "")
    return [said, written(who), written(f"{claim.relation} {bound}, {tested}, {claim.seeds} or more")]


def settings(experiment: Experiment) -> str:
    """The fields of the three presets."""
    presets = {name: plain(config) for name, config in experiment.presets.items()}

    def shown(value: object) -> str:
        return written(textwrap.shorten(str(value), 60, placeholder=" …"))

    rows = [[f"`{field}`", *(shown(presets[name][field]) for name in presets)] for field in presets["laptop"]]
    return table(["setting", *presets], rows)


def page(experiment: Experiment) -> str:
    """Question, command, claims, settings."""
    claims = list(experiment.claims(experiment.presets["laptop"]))
    parts = [
        f"# {written(experiment.title)}",
        written(experiment.summary),
        f"*{written(experiment.paper)}: {written(experiment.figure)}.*"
        + (f" Takes {written(experiment.cost.rstrip('.'))}." if experiment.cost else ""),
        "## Run it",
        f"```\nlayerwise run {experiment.name}                   # preset laptop\n"
        f"layerwise run {experiment.name} --preset smoke    # seconds: does it work here?\n"
        f"layerwise check {experiment.name}\nlayerwise report {experiment.name}\n```",
    ]
    if (RUNS / experiment.name).is_dir():  # the build has run it
        link = f"../report/{experiment.name}/index.html"
        parts.append(f'<a href="{link}">Its page of the report</a> has the figures and the verdicts of a run.')
    if claims:
        parts += ["## Claims", "With the settings of the preset `laptop`."]
        parts.append(table(["claim", "whose", "holds if"], [claim_row(claim) for claim in claims]))
    parts += ["## Presets", settings(experiment)]
    module = (catalog.reference_to(experiment) or "").partition(":")[0]
    if module:
        parts.append(f"Declared in `{module}`.")
    return "\n\n".join(parts) + "\n"


def index(known: dict[str, Experiment]) -> str:
    """All of them, by paper."""
    papers: dict[str, list[Experiment]] = defaultdict(list)
    for experiment in known.values():
        papers[experiment.paper].append(experiment)
    parts = [
        "# Experiments",
        f"{len(known)} figures and theorems that one command runs and checks. Each declares its claims before it runs; "
        "the [guide](../guides/experiments.md) says how verdicts are reached, and "
        "[what is checked of the paper](../paper-coverage.md) lists every statement of the first paper.",
    ]
    if RUNS.is_dir():
        names = ", ".join(sorted(path.name for path in RUNS.iterdir() if path.is_dir()))
        parts.append(
            f'<a href="../report/index.html">The report</a> is what `layerwise report` makes of records: figures, '
            f"claims with their verdicts, how to make them again. The build of this site has run {names} for it."
        )
    for paper, inside in sorted(papers.items()):
        parts.append(f"## {written(paper)}")
        parts.append(table(["experiment", "asks"], [[f"[{e.name}]({e.name}.md)", written(e.title)] for e in inside]))
    parts.append("```{toctree}\n:hidden:\n\n" + "\n".join(known) + "\n```")
    return "\n\n".join(parts) + "\n"


def write(app: Sphinx) -> None:
    """Files whose text is new; others keep their time, so that they are not built again."""
    known = catalog.experiments()
    pages = {f"{name}.md": page(experiment) for name, experiment in known.items()} | {"index.md": index(known)}
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def report(app: Sphinx, error: Exception | None) -> None:
    """The pages of what the build has run, beside the site."""
    if error is None and RUNS.is_dir():
        write_report(RUNS, Path(app.outdir) / "report")


def setup(app: Sphinx) -> dict[str, bool]:
    """Before the sources are listed, and when all is written."""
    app.connect("builder-inited", write, priority=100)
    app.connect("build-finished", report, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

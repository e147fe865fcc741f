"""The site: an overview of all experiments and a page for each, in files that need nothing from anywhere else."""

import base64
import csv
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.experiments import catalog
from layerwise.experiments.experiment import PRESETS, Experiment
from layerwise.experiments.figures import Figure
from layerwise.foundations.errors import FileFormatError, describe
from layerwise.report import matrix, plots, views, wording
from layerwise.report.gather import Chapter, Run, gather
from layerwise.report.optional import require
from layerwise.report.palette import HUES, MARKERS, PAPER, css_name
from layerwise.report.pictures import FORMATS, MOST_SEEDS, picture, save

TEMPLATES = Path(__file__).parent / "templates"
Rows = dict[int, list[views.ClaimRow]]
"""The claims of each run as rows, by the run's identity: the page makes them, and the overview counts them."""


def write(runs: Path, out: Path, *, experiments: Sequence[Experiment] | None = None, files: bool = False) -> Path:
    """Write the report of a folder of records, and return the path of its overview.

    Args:
        runs: folder of records, as `layerwise run` leaves it.
        out: folder of the site; files of an earlier report are replaced.
        experiments: what the overview lists; None for the catalog. Records of others are named in a note, since no
            file of records is trusted to say which module is imported.
        files: also write every figure as SVG, PDF and PNG for papers, and its points as CSV.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder) / "runs", Path(folder) / "report", experiments=[]).name
    'index.html'
    """
    runs, out = Path(runs), Path(out)
    listed = list(catalog.experiments().values()) if experiments is None else list(experiments)
    chapters, strays = gather(runs, listed)
    chapters.sort(key=lambda chapter: chapter.experiment.paper)  # pages of one paper follow one another
    templates = _templates()
    try:
        out.mkdir(parents=True, exist_ok=True)
        rows: Rows = {}
        for place, chapter in enumerate(chapters):
            folder = out / chapter.experiment.name
            folder.mkdir(exist_ok=True)
            page = _chapter(chapter, folder, rows, files) | _neighbours(chapters, place)
            _print(folder / "index.html", templates.get_template("experiment.html.j2"), **page)
        _print(out / "index.html", templates.get_template("index.html.j2"), **_index(chapters, strays, rows))
    except OSError as error:
        raise FileFormatError(
            describe(
                f"{out}, where the report could not be written ({error.strerror or error})",
                "a folder that can be written to, with room for the figures",
                "choose another folder, or make room",
            )
        ) from error
    return out / "index.html"


def _templates() -> Any:
    jinja2 = require("jinja2")
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,  # a name with < or & stays a name
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["hues"] = {css_name(hue): pair for hue, pair in HUES.items() if hue != "ink"}
    made.globals["ink"], made.globals["paper"] = HUES["ink"], PAPER
    made.globals["marks"], made.globals["shapes"] = [plots.SHAPES[marker] for marker in MARKERS], matrix.SHAPES
    made.globals["squares"], made.globals["summed_up"] = matrix.squares, wording.summed_up
    made.filters["dense"], made.filters["coded"] = _dense, _coded
    made.globals["scripts"] = {name: _script(name) for name in ("overview", "article")}
    return made


def _script(name: str) -> tuple[str, str]:
    """A script, and the hash by which its page allows it and no other, whatever a name in the records says."""
    lines = map(str.strip, (TEMPLATES / f"{name}.js").read_text(encoding="utf-8").splitlines())
    text = "\n".join(_without_blanks(line) for line in lines if line and not line.startswith("//"))
    return text, base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _without_blanks(line: str) -> str:
    """A line of the script without blanks around signs; what stands in quotes stays.

    >>> _without_blanks('const a = { b: "c = d" };')
    'const a={b:"c = d"};'
    """
    parts = re.split(r"""("[^"]*"|`[^`]*`)""", line)
    return "".join(part if k % 2 else re.sub(r" *([=+*?:,;(){}<>&|]) *", r"\1", part) for k, part in enumerate(parts))


def _dense(css: str) -> str:
    """Style without the blanks that only its authors need: every page has its own copy."""
    return re.sub(r"\s*([{};,])\s*|(?<=:)\s+|\s*\n\s*", r"\1", css).replace(";}", "}")


def _coded(text: str) -> Any:
    """Text with what stands between backticks as code."""
    markup = require("markupsafe")
    parts = (str(markup.escape(part)) for part in text.split("`"))
    return markup.Markup("".join(f"<code>{part}</code>" if k % 2 else part for k, part in enumerate(parts)))


def _print(path: Path, template: Any, **names: Any) -> None:
    path.write_text(template.render(**names) + "\n", encoding="utf-8", newline="\n")


# --- The overview ---------------------------------------------------------------------------------------------


def _index(chapters: Sequence[Chapter], strays: Sequence[str], claims: Rows) -> dict[str, Any]:
    rows = [_row(chapter, claims) for chapter in chapters]
    papers: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        papers.setdefault(row["experiment"].paper, []).append(row)
    sections = [_paper(name, inside, place) for place, (name, inside) in enumerate(papers.items())]
    tally = views.tally(row for section in sections for row in section["claims"])
    return {
        "kind": "overview",
        "papers": sections,
        "experiments": len(rows),
        "tally": tally,
        "outcomes": [kind for kind, _, _ in tally],
        "meanings": [(kind, words, wording.MEANINGS[kind]) for kind, _, words in tally],
        "unrun": sum(not chapter.runs for chapter in chapters),
        "spent": _spent(rows),
        "notes": strays,
    }


def _row(chapter: Chapter, claims: Rows) -> dict[str, Any]:
    """An experiment in the overview: the run that speaks for it, and the others beside it."""
    chosen = views.headline(chapter.runs)
    shown = _unrun(chapter.experiment) if chosen is None else claims[id(chosen)]
    return {
        "experiment": chapter.experiment,
        "chosen": None if chosen is None else views.run_heading(chosen),
        "others": [
            views.run_heading(run) | {"tally": views.tally(claims[id(run)])}
            for run in chapter.runs
            if run is not chosen
        ],
        "claims": shown,
        "tally": views.tally(shown),
        "seconds": sum(views.seconds(run) for run in chapter.runs),
        "notes": len(chapter.notes) + sum(len(run.notes) for run in chapter.runs),
    }


def _paper(name: str, rows: Sequence[Mapping[str, Any]], place: int) -> dict[str, Any]:
    """A paper with its experiments: what it comes to, and what did not hold with the reasons."""
    claims = [claim for row in rows for claim in row["claims"]]
    against = {
        "refuted": _against(rows, "known"),
        "misprints": _against(rows, "misprint"),
        "failed": _against(rows, "failed", "surprise", "error"),
    }
    return against | {
        "name": name,
        "short": views.short_paper(name),
        "anchor": f"paper-{place}",
        "rows": rows,
        "claims": claims,
        "tally": views.tally(claims),
        "spent": _spent(rows),
        "presets": _presets(rows),
    }


def _presets(rows: Sequence[Mapping[str, Any]]) -> str:
    """How demanding the runs are that speak for experiments, such as "3 at preset paper, 1 at preset smoke"."""
    chosen = Counter(row["chosen"]["preset"] for row in rows if row["chosen"])
    return ", ".join(f"{chosen[preset]} at preset {preset}" for preset in reversed(PRESETS) if chosen[preset])


def _spent(rows: Sequence[Mapping[str, Any]]) -> str:
    """Computing time of experiments in words, if it is worth a word."""
    total = sum(row["seconds"] for row in rows)
    return wording.duration(total) if total >= 0.05 else ""


@dataclass
class Against:
    """A statement that did not hold, once, however many claims of an experiment say it (of other settings)."""

    claim: views.ClaimRow
    right: views.ClaimRow | None
    """The claim that corrects a misprint."""
    count: int = 1


def _against(rows: Sequence[Mapping[str, Any]], *kinds: str) -> list[tuple[Experiment, list[Against]]]:
    """Statements of these outcomes, by experiment."""
    found = []
    for row in rows:
        said: dict[tuple[str, str], Against] = {}
        for claim, after in zip(row["claims"], [*row["claims"][1:], None], strict=True):
            if claim.outcome in kinds:
                key = (claim.statement, claim.why)
                if key in said:
                    said[key].count += 1
                else:
                    said[key] = Against(claim, after if claim.pair == "printed" else None)
        if said:
            found.append((row["experiment"], list(said.values())))
    return found


# --- Pages ----------------------------------------------------------------------------------------------------


def _neighbours(chapters: Sequence[Chapter], place: int) -> dict[str, Any]:
    """The experiments before and after, of the same paper."""
    paper = chapters[place].experiment.paper
    near = {"before": place - 1, "after": place + 1}
    return {
        key: chapters[k].experiment if 0 <= k < len(chapters) and chapters[k].experiment.paper == paper else None
        for key, k in near.items()
    }


def _chapter(chapter: Chapter, folder: Path, rows: Rows, files: bool) -> dict[str, Any]:
    experiment = chapter.experiment
    runs = [_run(run, folder, rows, files, f"r{place}") for place, run in enumerate(chapter.runs)]
    return {
        "kind": "article",
        "experiment": experiment,
        "summary": views.paragraphs(experiment.summary),
        "runs": runs,
        "outcomes": sorted({kind for run in runs for kind, _, _ in run["tally"]}),
        "unrun": [] if runs else _unrun(experiment),
        "presets": list(experiment.presets),
        "notes": chapter.notes,
    }


def _unrun(experiment: Experiment) -> list[views.ClaimRow]:
    claims = list(experiment.claims(experiment.preset("laptop")))
    return views.paired([views.unrun_claim(claim) for claim in claims], claims)


def _run(run: Run, folder: Path, all_rows: Rows, files: bool, prefix: str) -> dict[str, Any]:
    rows = all_rows[id(run)] = views.claim_rows(run)
    notes, figures = list(run.notes), []
    if run.done < run.expected:
        notes.insert(0, f"{run.done} of {run.expected} results are there. The command below goes on where it stopped.")
    singles = _by_seed(run)
    for place, figure in enumerate(run.figures):
        try:
            of_seeds = {seed: made[place] for seed, made in singles.items() if place < len(made)}
            figures.append(_figure(figure, folder, run.name, f"{prefix}f{place}", of_seeds, files))
        except (ValueError, TypeError) as error:  # such as curves whose x and y differ in length
            notes.append(f"Figure {figure.name} could not be drawn: {error}")
    said, differs = views.weaker(run, rows)
    return views.run_heading(run) | {
        "claims": rows,
        "tally": views.tally(rows),
        "figures": figures,
        "setting": views.setting(run),
        "weaker": said,
        "differs": differs,
        "settings": views.settings(run),
        "notes": notes,
    }


def _by_seed(run: Run) -> dict[int, Sequence[Figure]]:
    """The figures again, of the records of one seed each, for readers who want to see one; none where that fails."""
    records = run.recorded.records
    seeds = sorted({record["seed"] for record in records})[:MOST_SEEDS]
    found: dict[int, Sequence[Figure]] = {}
    if len(seeds) < 2 or not run.figures:
        return found
    for seed in seeds:
        try:
            found[seed] = run.experiment.figures(run.config, [r for r in records if r["seed"] == seed])
        except Exception:  # a figure may need several seeds; then there is nothing to choose
            return {}
    return found


def _figure(
    figure: Figure, folder: Path, run: str, prefix: str, by_seed: Mapping[int, Figure], files: bool
) -> dict[str, Any]:
    return {
        "anchor": f"figure-{views.slug(prefix)}",
        "title": figure.title,
        "caption": views.paragraphs(figure.caption),
        "picture": (drawn := picture(figure, views.slug(prefix), by_seed)),
        "left_out": views.left_out(drawn),
        "files": _files(figure, folder / views.slug(run)) if files else [],
        "tables": views.tables(figure),
    }


def _files(figure: Figure, place: Path) -> list[tuple[str, str]]:
    """Write the figure for papers; kinds and links."""
    place.mkdir(exist_ok=True)
    name = views.slug(figure.name)
    saved = [*save(figure, place, name), _save_points(figure, place / f"{name}.csv")]
    return [(kind.upper(), f"{place.name}/{path.name}") for kind, path in zip((*FORMATS, "csv"), saved, strict=True)]


def _save_points(figure: Figure, path: Path) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["panel", "curve", "x", "y", "low", "high"])
        table.writerows(_points(figure))
    return path


def _points(figure: Figure) -> Iterator[list[Any]]:
    for panel in figure.panels:
        for curve in panel.curves:
            blank = [math.nan] * len(curve.x)
            columns = [curve.x, curve.y, blank if curve.low is None else curve.low]
            columns.append(blank if curve.high is None else curve.high)
            for point in zip(*columns, strict=True):
                numbers = ["" if value is None or math.isnan(value) else repr(float(value)) for value in point]
                yield [panel.title, curve.label, *numbers]

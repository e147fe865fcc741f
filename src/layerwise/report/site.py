"""The site: an index of all experiments and a page for each, in files that need nothing from anywhere else."""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from layerwise.experiments import catalog
from layerwise.experiments.experiment import Experiment
from layerwise.experiments.figures import Figure
from layerwise.foundations.errors import FileFormatError, describe
from layerwise.report import views
from layerwise.report.gather import Chapter, Run, gather
from layerwise.report.optional import require
from layerwise.report.palette import HUES, PAPER, css_name
from layerwise.report.pictures import FORMATS, picture, save

TEMPLATES = Path(__file__).parent / "templates"
Rows = dict[int, list[views.ClaimRow]]
"""The claims of each run as rows, by the run's identity: the page makes them, and the index counts them."""


def write(runs: Path, out: Path, *, experiments: Sequence[Experiment] | None = None) -> Path:
    """Write the report of a folder of records, and return the path of its index.

    Args:
        runs: folder of records, as `layerwise run` leaves it.
        out: folder of the site; files of an earlier report are replaced.
        experiments: what the index lists; None for the catalog. Records of others are named in a note, since no file
            of records is trusted to say which module is imported.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder) / "runs", Path(folder) / "report", experiments=[]).name
    'index.html'
    """
    runs, out = Path(runs), Path(out)
    listed = list(catalog.experiments().values()) if experiments is None else list(experiments)
    chapters, strays = gather(runs, listed)
    templates = _templates()
    try:
        out.mkdir(parents=True, exist_ok=True)
        rows: Rows = {}
        for chapter in chapters:
            folder = out / chapter.experiment.name
            folder.mkdir(exist_ok=True)
            page = _chapter(chapter, folder, rows)
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
    return made


def _print(path: Path, template: Any, **names: Any) -> None:
    path.write_text(template.render(**names) + "\n", encoding="utf-8", newline="\n")


def _index(chapters: Sequence[Chapter], strays: Sequence[str], claims: Rows) -> dict[str, Any]:
    rows = [
        {
            "experiment": chapter.experiment,
            "runs": [views.run_heading(run) | {"tally": views.tally(claims[id(run)])} for run in chapter.runs],
            "declared": len(_unrun(chapter.experiment)),
            "notes": len(chapter.notes) + sum(len(run.notes) for run in chapter.runs),
        }
        for chapter in chapters
    ]
    everything = [row for chapter in chapters for run in chapter.runs for row in claims[id(run)]]
    return {
        "rows": rows,
        "tally": views.tally(everything),
        "unrun": sum(not chapter.runs for chapter in chapters),
        "notes": strays,
    }


def _chapter(chapter: Chapter, folder: Path, rows: Rows) -> dict[str, Any]:
    experiment = chapter.experiment
    return {
        "experiment": experiment,
        "summary": views.paragraphs(experiment.summary),
        "runs": [_run(run, folder, rows) for run in chapter.runs],
        "unrun": [] if chapter.runs else _unrun(experiment),
        "presets": list(experiment.presets),
        "notes": chapter.notes,
    }


def _unrun(experiment: Experiment) -> list[views.ClaimRow]:
    return [views.unrun_claim(claim) for claim in experiment.claims(experiment.preset("laptop"))]


def _run(run: Run, folder: Path, all_rows: Rows) -> dict[str, Any]:
    rows = all_rows[id(run)] = [views.claim_row(judged) for judged in run.claims]
    notes, figures = list(run.notes), []
    if run.done < run.expected:
        notes.insert(0, f"{run.done} of {run.expected} results are there. The command below goes on where it stopped.")
    for place, figure in enumerate(run.figures):
        try:
            figures.append(_figure(figure, folder, run.name, f"{run.name}-{place}"))
        except (ValueError, TypeError) as error:  # such as curves whose x and y differ in length
            notes.append(f"Figure {figure.name} could not be drawn: {error}")
    return views.run_heading(run) | {
        "claims": rows,
        "tally": views.tally(rows),
        "figures": figures,
        "settings": views.settings(run),
        "notes": notes,
    }


def _figure(figure: Figure, folder: Path, run: str, prefix: str) -> dict[str, Any]:
    name = views.slug(figure.name)
    place = folder / views.slug(run)
    place.mkdir(exist_ok=True)
    drawn = picture(figure, views.slug(prefix))
    saved = [*save(figure, place, name), _save_points(figure, place / f"{name}.csv")]
    return {
        "anchor": f"figure-{views.slug(prefix)}",
        "title": figure.title,
        "caption": views.paragraphs(figure.caption),
        "picture": drawn,
        "left_out": views.left_out(drawn),
        "files": [
            (kind.upper(), f"{place.name}/{path.name}") for kind, path in zip((*FORMATS, "csv"), saved, strict=True)
        ],
        "ends": views.last_points(figure),
    }


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

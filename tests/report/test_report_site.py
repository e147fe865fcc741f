"""The site as files: what is on it, what it says of what went wrong, and that it can be made again."""

import base64
import csv
import hashlib
import html
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import FINAL, ODD, Config, experiment, record

from layerwise.experiments.claims import Claim
from layerwise.experiments.experiment import Row
from layerwise.experiments.records import decode, encode
from layerwise.foundations.errors import FileFormatError, InputError, LayerwiseError
from layerwise.report import write
from layerwise.report.gather import gather
from layerwise.report.strips import strip

WORDS = re.compile(r"<(style|svg|script)\b.*?</\1>|<[^>]*>", re.DOTALL)


def said(path: Path) -> str:
    """The words of a page, without marks."""
    return " ".join(html.unescape(WORDS.sub(" ", path.read_text(encoding="utf-8"))).split())


def small(name="sample-one", **changes):
    return experiment(name, figures=lambda config, records: [], **changes)


def test_the_index_lists_every_experiment_with_its_claims(site):
    words = said(site / "index.html")
    assert "Preconditioning learns the representation" in words
    assert "6 not run" in words
    assert "never" in words
    assert "2 held" in words
    assert "1 refuted" in words
    assert "25 of 35 results recorded" in words
    assert "1 of 4 has not been run." in words
    assert "laptop: a minute; paper: ten minutes" in words


def test_the_overview_counts_one_run_an_experiment(site):
    """The one that is complete, though another preset is more demanding; the other one is named beside it."""
    words = said(site / "index.html")
    assert "4 experiments repeat figures, tables and theorems of 3 publications" in words
    assert "Of 118 claims, 100 held, 1 is refuted, 1 is a misprint, 3 failed" in words
    assert "2 experiments: 1 at preset laptop" in words
    assert "preset laptop, 2 seeds" in words
    assert "also preset paper" in words


def test_the_overview_says_what_did_not_hold_and_why(site):
    words = said(site / "index.html")
    assert (
        "NGD at the same rate stays far from the representation. Caption of Figure 1 Why it fails: At the rate" in words
    )
    assert "The bound is d. eq. (7) What is right: The bound is 1 + d. held" in words
    assert "The distance vanishes. Found 0.105 (0.1 to 0.11); the claim asks for ≤ 0." in words


def test_the_picture_has_a_square_a_claim_and_says_which(site):
    page = (site / "index.html").read_text(encoding="utf-8")
    assert page.count("<title>held: ") == 100
    assert "<title>misprint: The bound is d.</title>" in page
    assert page.count('href="#is-not-run"') == 6 + 1  # and the one in the legend


def test_a_page_shows_claims_settings_and_how_to_make_it_again(site):
    words = said(site / "sample-one" / "index.html")
    for expected in (
        "KFAC finds the representation: its subspace distance ends at 0.12 or below.",
        "≤ 0.12 every seed",
        "refuted",
        "Of 6 claims, 2 held, 1 is refuted, 2 failed and 1 lacks runs.",
        "Why it fails: At the rate of KFAC, NGD with the exact Fisher matrix ties with it",
        "not enough runs",
        "the 95 % interval of the mean",
        "layerwise run sample-one --preset paper",
        "layerwise run sample-one --preset laptop",
        "iterations 1000",
        "torch",
        "cores",
        "seeds 0, 1, 2, 3, 4",
    ):
        assert expected in words, expected


def test_the_most_demanding_preset_comes_first(site):
    words = said(site / "sample-one" / "index.html")
    assert words.index("Preset paper Of 6 claims") < words.index("Preset laptop Of 6 claims")


def test_damaged_lines_and_missing_results_are_noted(site):
    words = said(site / "sample-one" / "index.html")
    assert "25 of 35 results are there." in words
    assert re.search(r"paper-[0-9a-f]{8}\.jsonl, line 27: damaged or cut short", words)
    assert str(site.parent) not in words  # a page that is sent away does not tell where it was made


def test_points_that_have_no_place_are_noted(site):
    assert "Subspace distance, Transfer loss — SGD: 96 of 101 points not shown" in said(
        site / "sample-one" / "index.html"
    )


def test_an_experiment_that_never_ran_says_what_it_would_check(site):
    words = said(site / "never-run" / "index.html")
    assert "Not run yet" in words
    assert "layerwise run never-run --preset laptop" in words
    assert words.count("not run") >= 6


def test_odd_names_are_text_and_not_marks(site):
    page = (site / "odd-one" / "index.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert html.escape(ODD[:30], quote=False)[:20] in page
    words = said(site / "odd-one" / "index.html")
    assert ODD.split("verylong")[0].strip() in words
    assert "Figure uneven could not be drawn" in words
    assert "empty: no points recorded." in words


def test_names_of_figures_do_not_leave_the_folder(site_with_files):
    (folder,) = [path for path in (site_with_files / "odd-one").iterdir() if path.is_dir()]
    assert (folder / "odd-name-up.svg").is_file()
    assert not list(site_with_files.glob("up*"))


def test_figures_come_as_files_with_their_numbers(site_with_files):
    (folder,) = (site_with_files / "sample-one").glob("laptop-*")
    assert {path.suffix for path in folder.iterdir()} == {".svg", ".pdf", ".png", ".csv"}
    with (folder / "head-to-head.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    last = [row for row in rows if row["panel"] == "Subspace distance" and row["curve"] == "KFAC"][-1]
    assert float(last["x"]) == 400
    assert float(last["low"]) <= float(last["y"]) <= float(last["high"])
    assert {row["curve"] for row in rows} == {*FINAL, "noise floor"}


def test_links_lead_to_files_and_places_that_are_there(site):
    check_links(site)


def test_links_of_a_site_with_files_lead_somewhere(site_with_files):
    check_links(site_with_files)


def check_links(site):
    for path in site.rglob("*.html"):
        targets = re.findall(r'<a [^>]*href="([^"]*)"', path.read_text(encoding="utf-8"))
        assert targets
        for target in targets:
            file, _, place = html.unescape(target).partition("#")
            reached = path.parent / file if file else path
            assert reached.is_file(), target
            assert not place or f'id="{place}"' in reached.read_text(encoding="utf-8"), target


def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"|http-equiv', "", page)
        assert "@import" not in page


def test_a_page_has_one_script_and_allows_no_other(site):
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{allowed}';" in page
        kinds = set(re.findall(r"<script([^>]*)>", page))
        assert kinds <= {"", ' type="application/json"'}
        assert not re.search(r"\bon[a-z]+=\"", page)


def test_files_for_papers_are_written_when_asked_for(tmp_path):
    made = experiment()
    record(tmp_path / "runs", made, "smoke")
    out = write(tmp_path / "runs", tmp_path / "out", experiments=[made]).parent
    assert {path.suffix for path in out.rglob("*") if path.is_file()} == {".html"}
    assert "For papers" not in said(out / "sample-one" / "index.html")


def test_a_page_says_what_is_weaker_than_the_paper(site):
    words = said(site / "sample-one" / "index.html")
    assert "The settings are those of the preset paper" in words
    assert "Only 25 of 35 results are recorded." in words
    assert "setting here preset paper seeds 2 5 iterations 400 1000" in words
    assert "5 claims are our own expectation rather than a sentence of the paper." in words


def test_a_misprint_stands_above_its_correction(site):
    words = said(site / "crowded" / "index.html")
    assert "As printed: The bound is d." in words
    assert "Corrected: The bound is 1 + d." in words
    assert "What is right" not in words  # the row below says it


def test_a_page_leads_to_its_neighbours(site):
    words = said(site / "never-run" / "index.html")
    assert "← Preconditioning learns the representation" in words
    assert "→" not in words.split("Preconditioning learns")[0]


def test_pages_are_small(site):
    """Of five megabytes, eighty experiments have 62 kB each; what all of them share must leave room for figures."""
    page = (site / "never-run" / "index.html").read_text(encoding="utf-8")
    shared = sum(len(part.encode()) for part in re.findall(r"<style>.*?</style>|<script>.*?</script>", page, re.DOTALL))
    assert shared < 22_000
    crowded = (site / "crowded" / "index.html").stat().st_size
    assert crowded < 200_000  # 36 curves of two seeds, and a hundred claims


ALL_SMALL = """
import sys
from pathlib import Path
from layerwise.experiments import catalog
from layerwise.experiments.runner import run
from layerwise.report import write

runs, out = map(Path, sys.argv[1:])
for experiment in catalog.experiments().values():
    run(experiment, preset="smoke", out=runs)
write(runs, out)
"""


@pytest.mark.slow
def test_all_experiments_of_all_papers_take_less_than_five_megabytes(tmp_path):
    """The smallest preset of each, as a user runs them: in a process of its own, in some minutes."""
    subprocess.run([sys.executable, "-c", ALL_SMALL, tmp_path / "runs", tmp_path / "out"], check=True)
    pages = list((tmp_path / "out").rglob("*.html"))
    assert len(pages) > 80
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()) < 5e6


def test_the_same_records_give_the_same_files(tmp_path):
    made = experiment(figures=lambda config, records: experiment().figures(config, records)[1:])
    record(tmp_path / "runs", made, "smoke")
    first, second = (write(tmp_path / "runs", tmp_path / name, experiments=[made]).parent for name in ("a", "b"))
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(names) == 2
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_a_report_is_written_over_an_older_one(tmp_path):
    made = small()
    assert "6 not run" in said(write(tmp_path / "runs", tmp_path / "out", experiments=[made]))
    record(tmp_path / "runs", made, "smoke")
    assert "6 not run" not in said(write(tmp_path / "runs", tmp_path / "out", experiments=[made]))


def test_a_folder_that_is_not_there_is_nothing_run(tmp_path):
    words = said(write(tmp_path / "runs", tmp_path / "out", experiments=[small()]))
    assert "There is no folder runs yet: nothing has been run." in words


def test_changed_settings_are_in_the_table_and_in_the_command(tmp_path):
    made = small()
    record(tmp_path / "runs", made, "smoke", config=replace(Config(), iterations=33, fresh=False))
    words = said(write(tmp_path / "runs", tmp_path / "out", experiments=[made]).parent / "sample-one" / "index.html")
    assert "layerwise run sample-one --preset smoke --iterations 33 --no-fresh" in words
    assert "iterations 33 (preset: 20)" in words
    assert "fresh no (preset: yes)" in words


def test_claims_and_figures_that_fail_are_said_and_nothing_else_is_lost(tmp_path):
    def broken(config):
        fails = Claim(name="fails", statement="It fails.", quantity=lambda records: 1 / 0, relation="<=", target=1)
        return [fails, *experiment().claims(config)]

    made = experiment(claims=broken, figures=lambda config, records: records["no such"])
    record(tmp_path / "runs", made, "smoke")
    words = said(write(tmp_path / "runs", tmp_path / "out", experiments=[made]).parent / "sample-one" / "index.html")
    assert "could not be judged" in words
    assert "ZeroDivisionError" in words
    assert "The figures could not be made from these records: TypeError" in words
    assert "KFAC finds the representation" in words


def test_records_that_nobody_can_read_are_noted_where_they_belong(tmp_path):
    made = small()
    record(tmp_path / "runs", made, "smoke")
    for folder in ("sample-one", "of-another-time"):
        (tmp_path / "runs" / folder).mkdir(exist_ok=True)
        (tmp_path / "runs" / folder / "paper-00000000.jsonl").write_text("no record\n")
    out = write(tmp_path / "runs", tmp_path / "out", experiments=[made]).parent
    assert "of-another-time/paper-00000000.jsonl is left out" in said(out / "index.html")
    words = said(out / "sample-one" / "index.html")
    assert "sample-one/paper-00000000.jsonl is left out" in words
    assert "Preset smoke" in words


def test_the_page_says_that_seeds_agree(tmp_path):
    made = small(run=lambda config, cell, seeds: [Row(seed=seed, values={"dist": 0.1, "loss": 0.2}) for seed in seeds])
    record(tmp_path / "runs", made, "smoke")
    words = said(write(tmp_path / "runs", tmp_path / "out", experiments=[made]).parent / "sample-one" / "index.html")
    assert "KFAC: seeds 0 and 1 gave bitwise equal results: is the seed used?" in words


def test_records_of_another_module_are_named_and_nothing_is_imported(tmp_path):
    made = small()
    path = record(tmp_path / "runs", made, "smoke")
    entry = decode(path.read_bytes().split(b"\n")[0])
    planted = tmp_path / "runs" / "evil" / path.name
    planted.parent.mkdir()
    planted.write_bytes(encode(entry | {"experiment": "evil", "source": "no_such_evil_module:EXPERIMENT"}))
    words = said(write(tmp_path / "runs", tmp_path / "out", experiments=[made]))
    assert "evil/" in words
    assert "judge it with `layerwise check no_such_evil_module:EXPERIMENT`" in words
    assert "no_such_evil_module" not in sys.modules


def test_twenty_thousand_seeds_make_a_page_of_a_readable_size():
    small = Claim(name="c", statement="s", relation="<=", target=0.1, quantity=lambda records: {})
    assert 100 < strip(small, [seed / 20_000 for seed in range(20_000)]).count("h0") < 2000


def test_many_damaged_lines_are_summed_up(tmp_path):
    made = small()
    path = record(tmp_path / "runs", made, "smoke")
    path.write_bytes(path.read_bytes() + b"x\n" * 40)
    (chapter,), _ = gather(tmp_path / "runs", [made])
    assert len(chapter.runs[0].notes) == 6
    assert "35 more lines" in chapter.runs[0].notes[-1]


def test_records_in_place_of_a_folder(tmp_path):
    path = tmp_path / "runs"
    path.write_text("")
    with pytest.raises(InputError, match="which is a file"):
        write(path, tmp_path / "out", experiments=[])


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(FileFormatError, match="could not be written"):
        write(tmp_path / "runs", tmp_path / "out", experiments=[])


def test_a_full_disk(tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(FileFormatError, match=r"No space left on device.*make room"):
        write(tmp_path / "runs", tmp_path / "out", experiments=[small()])


def test_without_jinja2_the_command_to_type_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(LayerwiseError, match=r"pip install .layerwise\[report\]"):
        write(tmp_path / "runs", tmp_path / "out", experiments=[])


def test_the_catalog_is_what_is_listed_by_default(tmp_path):
    from layerwise.experiments import catalog

    words = said(write(tmp_path / "runs", tmp_path / "out"))
    assert all(name in words for name in catalog.experiments())


def test_no_part_of_the_report_is_ignored_by_git():
    """Git and the build of the wheel leave out what .gitignore names: "report/" there must not mean the package."""
    root = Path(__file__).parents[2]
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("no checkout")
    parts = [str(path) for path in (root / "src/layerwise/report").rglob("*") if path.suffix in (".py", ".j2", ".js")]
    done = subprocess.run(["git", "check-ignore", *parts], cwd=root, capture_output=True, text=True, check=False)
    assert len([part for part in parts if part.endswith((".j2", ".js"))]) >= 9
    assert done.stdout == ""

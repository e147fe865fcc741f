"""The site in a real Chromium: it loads, asks nobody, reads well on a phone, in the dark, on paper, by ear."""

from contextlib import contextmanager
from pathlib import Path

import pytest

PAGES = ["index.html", "sample-one/index.html", "never-run/index.html", "odd-one/index.html"]

DUPLICATES = """() => {
  const names = [...document.querySelectorAll("[id]")].map(one => one.id);
  return names.filter((name, place) => names.indexOf(name) !== place);
}"""
DANGLING = """() => {
  const asked = [];
  for (const one of document.querySelectorAll("*")) for (const at of one.attributes) {
    const found = /^(?:url\\()?#([^)]+)\\)?$/.exec(at.value);
    if (found && at.name !== "content") asked.push(found[1]);
  }
  return asked.filter(name => !document.getElementById(name));
}"""
# What a reader sees behind a text is the nearest background that is not transparent.
PALE = """() => {
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const c = numbers(getComputedStyle(one).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    if (![...one.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
    const style = getComputedStyle(one);
    const front = numbers(one.closest("svg.panel") ? style.fill : style.color);
    const [low, high] = [light(front), light(behind(one))].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push([one.tagName, one.className, one.textContent.trim().slice(0, 40), ratio]);
  }
  return found;
}"""
DRAWINGS = """() => [...document.querySelectorAll("svg.panel")].map(one => {
  const box = one.getBoundingClientRect(), text = one.querySelector("text");
  const coloured = [...one.querySelectorAll("path[style*='--hue-']")];
  return {
    width: box.width, height: box.height, left: box.left, right: box.right,
    curves: coloured.filter(path => path.getBoundingClientRect().width > 0).length,
    label: one.getAttribute("aria-label"),
    letters: parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a,
  };
})"""
BACKGROUND = "() => getComputedStyle(document.body).backgroundColor"


@contextmanager
def opened(browser, path, *, width=1280):
    """A page, and all that went wrong or out while it was open."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="light")
    page = context.new_page()
    page.wrong, page.asked = [], []
    page.on("console", lambda message: page.wrong.append(message.text))
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("requestfailed", lambda request: page.wrong.append(f"failed: {request.url}"))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(Path(path).as_uri())
    yield page
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_pages_load_without_a_word_and_ask_nobody(browser, site, name):
    with opened(browser, site / name) as page:
        page.wait_for_load_state("networkidle")
        assert page.locator("h1").is_visible()
        assert page.wrong == []
        assert all(url.startswith(("file:", "data:")) for url in page.asked), page.asked
        assert page.evaluate(DUPLICATES) == []
        assert page.evaluate(DANGLING) == []


def test_the_watch_for_requests_sees_them(browser, site, tmp_path):
    """The test above could fail: a page that asks for something elsewhere is caught."""
    bad = tmp_path / "bad.html"
    bad.write_text('<title>bad</title><img src="http://example.com/x.png">')
    with opened(browser, bad) as page:
        page.wait_for_load_state("networkidle")
        assert any(url.startswith("http:") for url in page.asked)
        assert page.wrong


@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_wider_than_its_screen(browser, site, name):
    with opened(browser, site / name) as page:
        for width in (1280, 768, 360, 320):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [360, 1280])
def test_figures_are_seen(browser, site, width):
    with opened(browser, site / "sample-one" / "index.html", width=width) as page:
        drawings = page.evaluate(DRAWINGS)
        assert len(drawings) == 5  # three panels and one, and for the run that is not complete another one
        for drawing in drawings:
            assert drawing["width"] > 250
            assert drawing["height"] > 150
            assert 0 <= drawing["left"] < drawing["right"] <= width
            assert 7.5 <= drawing["letters"] <= 18
            assert drawing["curves"] >= 3
            assert drawing["label"]


def test_a_curve_is_seen_on_light_and_on_dark(browser, site):
    """The curve of KFAC is drawn in the colour that it has on that page."""
    from layerwise.report.palette import HUES

    with opened(browser, site / "sample-one" / "index.html") as page:
        for place, scheme in enumerate(("light", "dark")):
            page.emulate_media(color_scheme=scheme)
            curve = page.locator("svg.panel path[style*='--hue-blue']").first
            red, green, blue = (int(HUES["blue"][place][k : k + 2], 16) for k in (1, 3, 5))
            assert curve.evaluate("one => getComputedStyle(one).stroke") == f"rgb({red}, {green}, {blue})"


def test_dark_and_light_pages_differ_and_paper_is_always_white(browser, site):
    with opened(browser, site / "sample-one" / "index.html") as page:
        assert page.evaluate(BACKGROUND) == "rgb(255, 255, 255)"
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(BACKGROUND) == "rgb(21, 24, 28)"
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate(BACKGROUND) == "rgb(255, 255, 255)"
        page.set_viewport_size({"width": 718, "height": 1000})  # A4 without its margins
        assert page.evaluate("document.documentElement.scrollWidth") <= 718
        assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("name", PAGES[:3])
def test_all_text_stands_out(browser, site, name):
    with opened(browser, site / name) as page:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(PALE) == []
        page.add_style_tag(content=".kicker { color: #555 !important }")  # too dark on the dark page, and found
        assert {found[1] for found in page.evaluate(PALE)} == {"kicker"}


def test_one_gets_from_the_index_to_a_page_and_back(browser, site):
    with opened(browser, site / "index.html") as page:
        page.get_by_role("link", name="Preconditioning learns the representation").click()
        assert page.locator("h1").inner_text() == "Preconditioning learns the representation"
        page.get_by_role("link", name="Preset laptop").click()
        assert page.locator("section[id^=laptop-] h2").is_visible()
        page.get_by_role("link", name="All experiments").click()
        assert page.locator("h1").inner_text() == "Experiments and their claims"
        assert page.wrong == []


def test_tables_keep_their_headers_also_on_a_phone(browser, site):
    with opened(browser, site / "sample-one" / "index.html") as page:
        for width in (1280, 360):
            page.set_viewport_size({"width": width, "height": 800})
            table = page.get_by_role("table").first
            assert table.get_by_role("columnheader").count() == 7
            assert table.get_by_role("rowheader").count() == 6
            assert table.get_by_role("row").count() == 7


def test_the_keyboard_reaches_everything(browser, site):
    with opened(browser, site / "sample-one" / "index.html") as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        assert page.locator(":focus").bounding_box()["x"] >= 0
        reached = set()
        for _ in range(16):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.className"))
        assert {"DIV scroll", "PRE ", "SUMMARY ", "A "} <= reached


def test_numbers_under_a_figure_unfold(browser, site):
    with opened(browser, site / "sample-one" / "index.html", width=360) as page:
        rows = page.locator("details table.ends").first
        assert not rows.is_visible()
        page.locator("summary").first.click()
        assert rows.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360

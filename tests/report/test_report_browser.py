"""The site in a real Chromium: it loads, asks nobody, reads well on a phone, in the dark, on paper, by ear."""

from contextlib import contextmanager
from pathlib import Path

import pytest

PAGES = ["index.html", "sample-one/index.html", "never-run/index.html", "odd-one/index.html", "crowded/index.html"]

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
    if (one.closest("svg.shapes, script, title, desc, [hidden]")) continue;
    const front = numbers(one.closest("svg.plot") ? style.fill : style.color);
    const [low, high] = [light(front), light(behind(one))].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push([one.tagName, one.className, one.textContent.trim().slice(0, 40), ratio]);
  }
  return found;
}"""
DRAWINGS = """() => [...document.querySelectorAll("svg.plot")].map(one => {
  const box = one.getBoundingClientRect(), text = one.querySelector("text");
  return {
    width: box.width, height: box.height, left: box.left, right: box.right,
    curves: [...one.querySelectorAll("g.curve")].filter(curve => curve.getBoundingClientRect().width > 0).length,
    label: one.getAttribute("aria-label"), told: one.getAttribute("aria-description"),
    letters: parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a,
  };
})"""
BACKGROUND = "() => getComputedStyle(document.body).backgroundColor"


@contextmanager
def opened(browser, path, *, width=1280, **options):
    """A page, and all that went wrong or out while it was open."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="light", **options)
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
            assert "against iteration" in drawing["told"] or "subspace distance" in drawing["told"]


def test_a_curve_is_seen_on_light_and_on_dark(browser, site):
    """The curve of KFAC is drawn in the colour that it has on that page."""
    from layerwise.report.palette import HUES

    with opened(browser, site / "sample-one" / "index.html") as page:
        for place, scheme in enumerate(("light", "dark")):
            page.emulate_media(color_scheme=scheme)
            curve = page.locator("svg.plot g.curve[style*='--hue-blue'] .line").first
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
        page.get_by_role("rowheader").get_by_role("link", name="Preconditioning learns the representation").click()
        assert page.locator("h1").inner_text() == "Preconditioning learns the representation"
        page.get_by_role("link", name="Preset laptop").first.click()
        assert page.locator("section[id^=laptop-] h2").is_visible()
        page.get_by_role("link", name="All experiments").click()
        assert page.locator("h1").inner_text() == "Experiments and their claims"
        assert page.wrong == []


def test_tables_keep_their_headers_also_on_a_phone(browser, site):
    with opened(browser, site / "sample-one" / "index.html") as page:
        for width in (1280, 360):
            page.set_viewport_size({"width": width, "height": 800})
            table = page.get_by_role("table").first
            assert table.get_by_role("columnheader").count() == 6
            assert table.get_by_role("rowheader").count() == 6
            assert table.get_by_role("row").count() == 7


def test_the_keyboard_reaches_everything(browser, site):
    with opened(browser, site / "sample-one" / "index.html") as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        assert page.locator(":focus").bounding_box()["x"] >= 0
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.className"))
        assert {"DIV scroll", "PRE ", "SUMMARY ", "A ", "BUTTON ", "SELECT ", "DIV box"} <= reached


def test_numbers_under_a_figure_unfold(browser, site):
    with opened(browser, site / "sample-one" / "index.html", width=360) as page:
        rows = page.locator("figure details table.values").first
        assert not rows.is_visible()
        page.locator("figure summary").first.click()
        assert rows.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def plot_of(page, place=1):
    """The panel of the subspace distance, of the run with two seeds (preset laptop)."""
    return page.locator("section[id^=laptop-] .box").nth(place)


def test_values_are_read_under_the_pointer(browser, site):
    """At the last step, KFAC's distance is what its formula gives."""
    with opened(browser, site / "sample-one" / "index.html") as page:
        box = plot_of(page)
        box.scroll_into_view_if_needed()
        size = box.bounding_box()
        page.mouse.move(size["x"] + 0.96 * size["width"], size["y"] + 0.5 * size["height"])
        tip = box.locator(".tip")
        assert tip.is_visible()
        assert tip.locator("strong").inner_text() == "iteration 400"
        shown = tip.locator("li", has_text="KFAC").locator("b").inner_text()
        assert float(shown) == pytest.approx(0.03, rel=0.2)
        page.mouse.move(0, 0)
        assert not tip.is_visible()
        assert page.wrong == []


def test_values_are_read_by_the_keyboard_and_said(browser, site):
    with opened(browser, site / "sample-one" / "index.html") as page:
        box = plot_of(page)
        box.focus()
        page.keyboard.press("End")
        heard = page.locator("[aria-live=polite]")
        assert "iteration 400" in heard.inner_text()
        page.keyboard.press("Home")
        assert "iteration 0" in heard.inner_text()
        assert "KFAC" in heard.inner_text()
        page.keyboard.press("Escape")
        assert not box.locator(".tip").is_visible()


def test_a_curve_can_be_hidden(browser, site):
    with opened(browser, site / "sample-one" / "index.html") as page:
        figure = page.locator("section[id^=laptop-] figure").first
        button, curve = figure.get_by_role("button", name="KFAC"), figure.locator("g.curve[data-key='0']").first
        assert curve.is_visible()
        button.press("Enter")
        assert not curve.is_visible()
        assert button.get_attribute("aria-pressed") == "false"
        button.click()
        assert curve.is_visible()


def test_a_seed_can_be_chosen(browser, site):
    """Alone, a seed has a line of its own and no band, and the pointer reads its values."""
    with opened(browser, site / "sample-one" / "index.html") as page:
        figure = page.locator("section[id^=laptop-] figure").first
        line = figure.locator("g.curve[data-key='1'] .line").nth(1)
        whole, drawn = line.get_attribute("d"), []
        assert figure.locator(".band").count() > 0
        for seed in ("0", "1"):
            figure.get_by_label("Show").select_option(label=f"seed {seed} alone")
            drawn.append(line.get_attribute("d"))
            assert figure.locator(".band").count() == 0
        assert len({whole, *drawn}) == 3
        figure.get_by_label("Show").select_option(label="all seeds")
        assert line.get_attribute("d") == whole
        assert page.wrong == []


def test_without_a_script_the_page_says_the_same(browser, site):
    with opened(browser, site / "sample-one" / "index.html", java_script_enabled=False) as page:
        figure = page.locator("figure").first
        assert figure.locator("svg.plot").first.is_visible()
        assert figure.locator("svg.plot > title").first.text_content() == "Training loss"
        assert "KFAC: from" in figure.locator("svg.plot > desc").first.text_content()
        assert figure.locator("button, select").count() == 0
        figure.locator("summary").click()
        assert figure.locator("table.values").first.is_visible()
        page.goto((site / "index.html").as_uri())
        assert not page.locator("#find").is_visible()


def test_experiments_are_found_by_words(browser, site):
    with opened(browser, site / "index.html") as page:
        rows = page.locator("table.index tbody tr")
        page.get_by_label("Find an experiment").fill("many claims")
        assert [row.is_visible() for row in rows.all()].count(True) == 1
        assert page.locator("#found").inner_text() == "1 of 4 experiments"
        page.get_by_label("Find an experiment").fill("")
        assert all(row.is_visible() for row in rows.all())


def test_a_claim_is_reached_from_the_overview(browser, site):
    with opened(browser, site / "index.html") as page:
        refuted = page.locator("details", has_text="1 refuted")
        refuted.get_by_role("link", name="Preconditioning learns the representation").click()
        assert "NGD at the same rate stays far" in page.locator("tr:target").inner_text()


def test_on_paper_what_is_folded_is_printed_and_what_needs_a_hand_is_not(browser, site):
    with opened(browser, site / "sample-one" / "index.html") as page:
        page.emulate_media(media="print")
        assert not page.locator(".tools").first.is_visible()
        assert not page.locator("nav").first.is_visible()
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator("table.values").first.is_visible()

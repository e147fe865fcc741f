"""The built site in a real Chromium: a silent console, nothing asked of others, a search that finds, no dead links."""

from contextlib import contextmanager

import pytest
from link_check import broken_links

from layerwise.experiments import catalog

pytestmark = pytest.mark.slow
PAGES = [
    "index.html",
    "choose.html",
    "methods/index.html",
    "methods/kfac.html",
    "guides/optimizers.html",
    "gallery/index.html",
    "gallery/plot_optimizers.html",
    "gallery/plot_laplace.html",
    "theory/kfac.html",
    "reference/optim.html",
    "reference/curvature.html",
    "experiments/index.html",
    "experiments/head-to-head.html",
    "report/index.html",
    "report/head-to-head/index.html",
    "changelog.html",
    "decisions/index.html",
]
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
BROKEN = "() => [...document.images].filter(one => !one.complete || one.naturalWidth === 0).map(one => one.src)"
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
  for (const one of document.querySelectorAll("article :is(p, td, th, li, h1, h2)")) {
    if (!one.textContent.trim()) continue;
    const [low, high] = [light(numbers(getComputedStyle(one).color)), light(behind(one))].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) found.push(one.textContent.trim().slice(0, 40));
  }
  return found;
}"""


@contextmanager
def opened(browser, url, *, width=1280, scheme="light"):
    """A page, and all that went wrong or out while it was open."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.wrong, page.asked = [], []
    page.on("console", lambda message: page.wrong.append(message.text))
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("requestfailed", lambda request: page.wrong.append(f"failed: {request.url}"))
    page.on(
        "response", lambda answer: page.wrong.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None
    )
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(url)
    page.wait_for_load_state("networkidle")
    yield page
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_pages_load_without_a_word_and_ask_nobody(browser, address, name):
    with opened(browser, f"{address}/{name}") as page:
        assert page.locator("h1").first.is_visible()
        assert page.wrong == []
        assert all(url.startswith((address, "data:")) for url in page.asked), page.asked
        assert page.evaluate(BROKEN) == []


@pytest.mark.parametrize(
    "name", ["index.html", "methods/kfac.html", "gallery/plot_optimizers.html", "theory/kfac.html"]
)
def test_pages_fit_a_phone(browser, address, name):
    with opened(browser, f"{address}/{name}", width=390) as page:
        assert page.evaluate(OVERFLOW) <= 0
        assert page.wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index.html", "methods/kfac.html", "reference/curvature.html"])
def test_text_can_be_read(browser, address, name, scheme):
    with opened(browser, f"{address}/{name}", scheme=scheme) as page:
        assert page.evaluate(PALE) == []


def test_the_start_page_shows_what_it_is_for(browser, address):
    """A figure, ten lines and a table, and the first screen has the figure."""
    with opened(browser, f"{address}/index.html") as page:
        figure = page.locator("article img").first.bounding_box()
        assert figure["y"] < 800
        assert figure["width"] > 400
        assert "lw.optim.KFAC" in page.locator("article pre").first.inner_text()
        assert page.locator("article table").first.locator("tr").count() >= 3


def test_formulas_are_drawn(browser, address):
    with opened(browser, f"{address}/methods/kfac.html") as page:
        box = page.locator("article math").first.bounding_box()
        assert box["width"] > 100
        assert box["height"] > 15


@pytest.mark.parametrize(("words", "expected"), [("damping", "guides/optimizers.html"), ("SOAP", "methods/soap.html")])
def test_the_search_finds(browser, address, words, expected):
    with opened(browser, f"{address}/search.html?q={words}") as page:
        page.wait_for_selector("#search-results li", timeout=20_000)
        page.wait_for_function("() => /found|finished/i.test(document.querySelector('#search-results').innerText)")
        links = page.locator("#search-results li a").evaluate_all("all => all.map(one => one.href)")
        assert any(expected in link for link in links), links
        assert page.wrong == []


def test_no_link_inside_the_site_is_broken(built):
    assert broken_links(built.resolve()) == []


def test_every_experiment_and_every_example_has_a_page(built):
    assert {path.stem for path in (built / "experiments").glob("*.html")} == {"index", *catalog.experiments()}
    examples = {path.stem for path in (built.parents[2] / "examples" / "gallery").glob("plot_*.py")}
    assert len(examples) >= 12
    assert examples <= {path.stem for path in (built / "gallery").glob("plot_*.html")}


def test_an_experiment_leads_to_its_page_of_the_report(browser, address):
    with opened(browser, f"{address}/index.html") as page:
        page.get_by_role("link", name="Experiments", exact=True).first.click()
        page.locator("article").get_by_role("link", name="head-to-head", exact=True).first.click()
        page.get_by_role("link", name="Its page of the report").click()
        assert page.locator("figure svg.plot").first.is_visible()
        page.get_by_role("link", name="All experiments").click()
        assert page.locator("h1").inner_text() == "Experiments and their claims"
        assert page.wrong == []


def test_every_example_has_a_picture(built):
    for page in (built / "gallery").glob("plot_*.html"):
        assert "sphx_glr_" in page.read_text(encoding="utf-8"), page.name

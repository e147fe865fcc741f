"""Pages of the report and of the doctor by the rules of WCAG, with axe-core in a real Chromium (`make test-site`)."""

import pytest
import torch
from test_report_browser import PAGES, opened
from torch import nn

import layerwise as lw
from axe_check import violations

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_axe_finds_nothing(browser, site, name, width, scheme):
    with opened(browser, site / name, width=width, bypass_csp=True) as page:
        page.emulate_media(color_scheme=scheme)
        assert violations(page) == []


def test_axe_would_find_something(browser, site):
    """The test above could fail: a button without a name and an image without words are found."""
    with opened(browser, site / "index.html", bypass_csp=True) as page:
        page.evaluate(
            "document.querySelector('main').insertAdjacentHTML('beforeend', '<button></button><img src=\"data:,\">')"
        )
        assert {found.split(":")[0] for found in violations(page)} == {"button-name", "image-alt"}


@pytest.fixture(scope="module")
def doctors_page(tmp_path_factory):
    """What the doctor says of a small network with inputs of very different sizes."""
    draws = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    inputs = torch.randn(256, 6, generator=draws) * torch.logspace(-3, 3, 6)
    data = [(inputs, torch.randint(0, 3, (256,), generator=draws))]
    path = tmp_path_factory.mktemp("doctor") / "doctor.html"
    return lw.doctor(model, data, likelihood="categorical", seconds=20.0).save_html(path)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_axe_finds_nothing_on_the_doctors_page(browser, doctors_page, width, scheme):
    with opened(browser, doctors_page, width=width, bypass_csp=True) as page:
        page.emulate_media(color_scheme=scheme)
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.wrong == []

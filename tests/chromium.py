"""A headless Chromium that reaches no network, for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TO_TYPE = "apt-get install -y chromium && pip install playwright"


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser that is installed here, or a skip that says what to type; it reaches this machine alone."""
    names = [os.environ.get("LAYERWISE_CHROMIUM", ""), *BROWSERS]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium here; type: {TO_TYPE}")
    playwright = pytest.importorskip("playwright.sync_api", reason=f"type: {TO_TYPE}")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path=path,
            args=[
                "--no-sandbox",
                "--disable-background-networking",
                "--disable-component-update",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            ],
        )
        yield opened
        opened.close()

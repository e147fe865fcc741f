"""The built site, served as it would be, and a browser to look with."""

import functools
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SITE = DOCS / "_build" / "html"
sys.path.append(str(DOCS / "_extensions"))  # tests import what the build uses


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a word on the terminal."""

    def log_message(self, format, *args):
        """Nothing."""


@pytest.fixture(scope="session")
def built() -> Path:
    """The folder that `make docs` fills."""
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built; type: make docs")
    return SITE


@pytest.fixture(scope="session")
def address(built):
    """Where the site is served, on this machine alone: the search fetches pages, which a file may not."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(built))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()

"""The site: Sphinx with MyST, furo and sphinx-gallery; ``make docs`` builds it, and a warning is an error."""

import os
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent / "src")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # an example is as fast, and gives the same numbers beside other work

import layerwise  # noqa: E402

project = "layerwise"
author = "the layerwise authors"
project_copyright = "the layerwise authors"
version = release = layerwise.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "mathml",
    "docstring_text",
    "experiment_pages",
    "flowchart",
    "repository_links",
    "link_check",
]
exclude_patterns = ["_build", "gallery/README.rst", "**/sg_execution_times.rst", "sg_execution_times.rst"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

# --- text --------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
# A page of ours may begin at any level below its title, as GitHub allows.
suppress_warnings = ["myst.header"]
pygments_style, pygments_dark_style = "friendly", "monokai"
highlight_language = "text"

# --- reference ---------------------------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures show them; a second list of types would say the same
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
default_role = "code"
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

# --- gallery -----------------------------------------------------------------------------------------------------

warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")
sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples" / "gallery"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"[\\/]",  # all of them run
    "ignore_pattern": r"__init__\.py",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "plot_gallery": True,
    "image_scrapers": ("matplotlib",),
    "image_srcset": ["2x"],
    "reset_modules": ("matplotlib",),
    "capture_repr": ("_repr_html_",),
    "copyfile_regex": r".*\.md",
}

# --- pages -------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"layerwise {version}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1b5e8c", "color-brand-content": "#1b5e8c"},
    "dark_css_variables": {"color-brand-primary": "#7fc1f0", "color-brand-content": "#7fc1f0"},
}

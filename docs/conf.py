"""The documentation site: `make docs` builds it, offline, with warnings as errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import netmoments

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))  # sphinx-gallery and the hooks below import figures.py and tables.py from here

project, author, release = "netmoments", "the netmoments authors", netmoments.__version__
version = release
copyright = "the netmoments authors, MIT licence"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # MathJax as files of the site: nothing is fetched
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["gallery", "_generated", "images"]
suppress_warnings = ["config.cache"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # annotations of torch and of private names have no page

myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
myst_dmath_double_inline = True

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "class"
napoleon_google_docstring, napoleon_numpy_docstring, napoleon_use_param = True, False, False
toc_object_entries_show_parents = "hide"
doctest_test_doctest_blocks = ""  # docstrings are run by pytest, each in its own module

html_theme = "furo"
html_title = f"netmoments {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
mathjax3_config = {"tex": {"macros": {"E": r"\operatorname{E}", "Cov": r"\operatorname{Cov}",
                                      "Var": r"\operatorname{Var}", "tr": r"\operatorname{tr}",
                                      "diag": r"\operatorname{diag}", "relu": r"\operatorname{relu}"}}}  # fmt: skip

sphinx_gallery_conf = {
    "examples_dirs": ["gallery"],
    "gallery_dirs": ["examples"],
    "filename_pattern": r"/[a-z_0-9]+\.py$",
    "within_subsection_order": "FileNameSortKey",
    "reset_modules": ("figures.readable_in_light_and_dark",),
    "image_scrapers": ("matplotlib",),
    "capture_repr": (),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "write_computation_times": False,  # its pages load scripts from elsewhere
    "min_reported_time": 1e9,
    "remove_config_comments": True,
    "matplotlib_animations": False,
    "plot_gallery": True,
    "nested_sections": False,
    "copyfile_regex": "",
}


def repository_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links of a page to files beside docs/ (records, results, modules) become files of the site.

    A folder becomes its README; an anchor inside such a file is dropped. Pictures are shown anyway.
    """
    here = (DOCS / docname).parent

    def inside(match: re.Match[str]) -> str:
        path = (here / match["path"]).resolve()
        if path.is_relative_to(DOCS) or path.suffix == ".png" or not path.exists():
            return match[0]
        return f"](path:{match['path'].rstrip('/')}{'/README.md' if path.is_dir() else ''})"

    source[0] = re.sub(r'\]\((?P<path>\.\./[^)\s#]+)(?:#[^)\s]*)?(?: "[^"]*")?\)', inside, source[0])


def plain_words(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with code between single backticks: what reStructuredText would read is escaped."""
    section = example = False
    found: list[str] = []
    for line in lines:
        words, indented = line.strip(), line.startswith("    ")
        if re.fullmatch(r"(Args|Returns|Raises|Yields):", words):
            section = True
        elif words and not indented:
            section = False
        if words.startswith(">>>"):
            example = True
        elif not words:
            example = False
        if example or not words:
            found.append(line)
        elif indented and not section:  # a formula, set off by indentation
            if found and not found[-1]:
                found += ["::", ""]
            found.append(line)
        else:
            found.append(re.sub(r"`([^`]+)`|([\\*|])|(?<=\w)(_)(?!\w)", escaped, line))
    if what in ("attribute", "data") and found:  # napoleon would read their first line as "type: words"
        found[0] = found[0].replace(": ", "\N{MODIFIER LETTER COLON} ")
    lines[:] = found


def escaped(match: re.Match[str]) -> str:
    """Code as reStructuredText has it, with a gap that is not shown (backslash, space) where it touches other signs."""
    if not match[1]:
        return f"\\{match[2] or match[3]}"
    text, start, end = match.string, match.start(), match.end()
    before = "\\ " if re.search(r"[^\s'\"(\[{</:-]$", text[:start]) else ""
    after = "\\ " if re.match(r"\w", text[end:]) else ""
    return f"{before}``{match[1]}``{after}"


def made_from_records(app: Sphinx) -> None:
    """Tables and figures of *How to choose* and *Performance*, from the records, before anything is read."""
    import figures
    import tables

    tables.write(DOCS / "_generated")
    figures.write(DOCS / "_generated")


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", made_from_records, priority=100)
    app.connect("source-read", repository_links)
    app.connect("autodoc-process-docstring", plain_words, priority=100)

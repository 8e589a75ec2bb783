"""The documentation site: pages are short, every public name is in the API, and tables come from records.

Where the site has been built (`make docs`), its links lead somewhere, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
import torch

import netmoments
from tests.test_readme import NUMBER, in_words, is_record, links, prose, run

ROOT = Path(__file__).parent.parent.parent
DOCS, BUILT = ROOT / "docs", ROOT / "build" / "docs"
PAGES = sorted(path for folder in ("", "theory", "api") for path in (DOCS / folder).glob("*.md"))
THEORY = [*(DOCS / "theory").glob("*.md"), DOCS / "propagation.md"]
GALLERY = sorted((DOCS / "gallery").glob("*.py"))
MOST_WORDS = 1500


def named(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.relative_to(DOCS).as_posix())


@pytest.fixture
def site_module(monkeypatch) -> Iterator[dict[str, ModuleType]]:
    """docs/records.py and docs/tables.py, imported as the site does."""
    monkeypatch.syspath_prepend(str(DOCS))
    yield {name: importlib.import_module(name) for name in ("records", "tables")}
    for name in ("records", "tables"):
        sys.modules.pop(name, None)


# Pages


@named([path for path in PAGES if path not in THEORY])
def test_pages_are_short(path):
    assert len(path.read_text().split()) <= MOST_WORDS


@named(PAGES)
def test_pages_begin_with_what_the_reader_gets(path):
    title, _, rest = path.read_text().partition("\n\n")
    assert title.startswith("# "), title
    assert re.match(r"[*`\[$\w]", rest), "words in front of code, tables and headings"
    assert not rest.startswith("```"), "words in front of code"


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for path in PAGES:
        for tree in re.findall(r":::\{toctree\}\n(.*?):::", path.read_text(), re.S):
            for line in tree.splitlines():
                target = re.sub(r".*<(.+)>$", r"\1", line.strip())
                if target and not target.startswith(":"):
                    listed.add((path.parent / f"{target}.md").resolve())
    assert {path.resolve() for path in PAGES} - listed == {(DOCS / "index.md").resolve()}


@named([path for path in PAGES if path.parent != DOCS])
def test_links_of_pages_in_folders_lead_somewhere(path):
    for link in links(prose(path)):
        if not re.match(r"https?:", link.target):
            assert (path.parent / link.target.partition("#")[0]).exists(), link


@named([path for path in PAGES if path.parent != DOCS])
def test_python_of_pages_in_folders_runs(path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for printed, shown in run(path, {"__name__": "example"}):
            assert not shown or printed == shown


def test_every_public_name_is_in_the_api():
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    listed = set(re.findall(r"auto\w+:: netmoments\.(\w+)", text))
    inside = {"propagate"}  # the doors to rules, whose names are those of `rules`
    assert set(netmoments.__all__) - inside <= listed


@pytest.mark.parametrize("name", netmoments.__all__)
def test_public_names_have_an_example_that_runs(name):
    """pytest runs what is there (`--doctest-modules`)."""
    thing = getattr(netmoments, name)
    if not inspect.ismodule(thing):
        assert ">>> " in inspect.getdoc(thing)


# The gallery


@named(GALLERY)
def test_examples_explain_themselves_and_are_seeded(path):
    text = path.read_text()
    assert re.match(r'"""\n(.+)\n=+\n\n', text), "a title, underlined, in the docstring"
    assert "plt.show()" in text
    assert "print(" in text
    assert "https://" not in text
    if re.search(r"torch\.rand|optim\.", text):
        assert "manual_seed" in text


# Tables from records


def test_tables_are_made_from_records(site_module):
    found = site_module["tables"].every_table()
    assert all(table.count("\n") >= 4 for table in found.values())
    assert {len(line.split(" | ")) for line in found["default-cpu"].splitlines()} == {5}
    included = {name for path in PAGES for name in re.findall(r"_generated/([\w-]+)\.md", path.read_text())}
    assert included == set(found)


def test_a_row_of_a_record_is_read_as_it_stands(site_module, tmp_path):
    record = tmp_path / "sampler.txt"
    record.write_text(
        "python -m benchmarks.sampler\n"
        "mlp             0.01  mean 0.00177  variance 0.00598  within 0.988  alone 0.0931  samples 1.18e+03\n"
        "mean       median 0.00754, at σ = 0.01 0.00642; worst 0.0125\n"
    )
    (row,) = site_module["records"].default_rows(record)
    assert row == ("mlp", 0.01, 0.00177, 0.00598, 0.988, 0.0931, 1180.0, None)


def test_methods_of_a_record_are_read_as_they_stand(site_module, tmp_path):
    record = tmp_path / "gallery.txt"
    record.write_text(
        "AMD EPYC, 1 threads\n"
        "vgg             0.05  layerwise   mean 0.0206  variance 0.012  time 0.845\n"
        "unet            0.30  two-stage   refused: one row of scores is needed\n"
    )
    (row,) = site_module["records"].gallery_rows(record)
    assert row == ("vgg", 0.05, "layerwise", 0.0206, 0.012, 0.845)


def test_layerwise_is_advised_for_digits_where_samples_would_take_longer(site_module):
    tables, records = site_module["tables"], site_module["records"]
    rows = records.gallery_rows(records.newest("*-cpu-gallery.txt"))
    assert {row.network for row in rows} == set(records.KINDS)
    here = {(row.network, row.method): row for row in rows if row.sigma == 0.05}
    better = []
    for name in records.KINDS:
        formula, sampled = here[name, "layerwise"], here[name, "auto"]
        share = sampled.time / formula.time  # errors of samples fall with its root
        if formula.mean**2 < share * sampled.mean**2 and formula.variance**2 < share * sampled.variance**2:
            better.append(name)
    (line,) = [line for line in tables.decisions().splitlines() if "more digits" in line and "0.05" in line]
    assert line.split(" | ")[0] == f"| {tables.in_words(better)}"


def test_networks_are_named_by_the_shorter_list(site_module):
    in_words, kinds = site_module["tables"].in_words, list(site_module["records"].KINDS)
    assert in_words(kinds) == "any"
    assert in_words(["mlp", "vit"]) == "MLP, ViT"
    assert in_words(kinds[1:]) == "all but MLP"


def test_flips_of_a_record_are_read_as_they_stand(site_module, tmp_path):
    record = tmp_path / "flips.txt"
    record.write_text(
        "lenet       5 σ 0.3000   4.77e-05 0.098 3.62e-05    6042    6042          2.1e+06\n"
        "digits      0 σ 0.2000    0.008  0.0059     229     253     291   0.79\n"
    )
    (row,) = site_module["records"].flips(record)
    assert row == ("lenet", 4.77e-05, 6042.0, 2.1e6)


FOLLOW = {
    "engine.md": {"0.87", "80"},  # where kernels change their ways: of the code
    "flips.md": {"1e11", "129", "126", "40"},  # 100/p; sums over the record's tables
    "methods.md": {"200,", "190"},  # quotients of its errors
    "networks.md": {"1e-9", "100"},  # an example; "99 of 100"
}
"""Numbers beside a record that are not in it, but follow from it, or are no measurements."""


@named([path for path in PAGES if path.name != "experiments.md"])
def test_numbers_of_a_paragraph_that_cites_a_record_are_in_it(path):
    for paragraph in re.split(r"\n\n+", prose(path)):
        sources = [link.target.partition("#")[0] for link in links(paragraph) if is_record(link.target)]
        if not sources or paragraph.startswith("|"):
            continue
        records = "\n".join((path.parent / source).read_text(errors="replace") for source in sources)
        said = re.sub(r"\]\([^)]*\)|`[^`]*`", "", paragraph)
        missing = {number for number in NUMBER.findall(said) if not in_words(records, number)}
        assert missing <= FOLLOW.get(path.name, set()), f"not in {sources}"


# Release files


def test_the_citation_has_the_version():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited is not None
    assert cited[1].strip('"') == netmoments.__version__


def test_the_workflow_runs_the_commands_that_there_are():
    workflow, makefile = (ROOT / ".github/workflows/checks.yml").read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"run: make ([\w-]+)", workflow)
    assert {"test", "docs", "test-wheel"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


# What was built


class Page(HTMLParser):
    """The targets and the anchors of a page, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.targets.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    if not (BUILT / "index.html").exists():
        pytest.skip("the site has not been built: make docs")
    return {path: Page(path.read_text()) for path in BUILT.rglob("*.html") if "_static" not in path.parts}


def test_links_of_the_site_lead_somewhere(pages):
    assert len(pages) > 40
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert there.exists(), f"{path.name}: {target}"
            if parts.fragment and there in pages:
                assert unquote(parts.fragment) in pages[there].anchors, f"{path.name}: {target}"


def test_links_elsewhere_are_addresses(pages):
    """Whether anybody answers there is not asked: the site is built offline."""
    elsewhere = {target for page in pages.values() for target in page.targets if urlsplit(target).scheme}
    assert elsewhere
    for target in elsewhere:
        assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w./~%#?=&+-]*[\w/])?/?", target), target


def test_the_site_loads_nothing_from_elsewhere(pages):
    for path, page in pages.items():
        for target in page.loaded:
            assert not urlsplit(target).netloc, f"{path.name} loads {target}"
            assert (path.parent / unquote(urlsplit(target).path)).exists(), f"{path.name} loads {target}"
    for style in (BUILT / "_static").rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", style.read_text()), style.name

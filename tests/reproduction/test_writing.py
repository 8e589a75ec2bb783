"""Reproduced tables and figures: in the terminal, as files, and on one page."""

from __future__ import annotations

import dataclasses
import doctest
import errno
import importlib
import io
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from rich.console import Console

from netmoments.report.words import in_words
from netmoments.sweep.local import LocalEngine
from reproduction import experiment
from reproduction.experiment import (
    COMMIT,
    RUNS,
    UNKNOWN,
    BesidePaper,
    Drawing,
    Machine,
    Origin,
    Outcome,
    Panel,
    Recorded,
    Settings,
    commit_here,
    commits,
    machines,
)
from reproduction.writing import (
    as_markdown,
    difference_in_words,
    draw,
    number_columns,
    plain,
    read_summary,
    summary_of,
    write_outcome,
    write_page,
)

EVIL = "<script>alert('[red]')</script>"
FILES = ["curves.pdf", "curves.png", "summary.json", "table.md"]


def two_curves():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.5))
    left, right = figure.subplots(1, 2)
    left.plot([0, 1, 2], [0, 1, 4], label="$\\sigma$")
    left.legend()
    right.hist([1, 2, 2, 3])
    return figure


TOY = Outcome(
    name="table-9",
    title="Table 9: a toy",
    reading=("Pixels are in [0,1].", f"- not a list, {EVIL}"),
    comparisons=(BesidePaper("error of P(a|b)", 0.125, 0.1), BesidePaper("kernel", 2.2e-16, None)),
    panels=(
        Panel(
            "Errors, [bold]all[/bold]",
            ("class", "error |ρ| ≤ 0.5", "time"),
            (("0", "0.2 ± 0.1", "3 ms"), ("a|b", "1.5e-7", "—"), ("[red]avg", "", "2 s")),
            "Caption of *one*",
            emphasis=(1,),
            breaks=(2,),
        ),
        Panel("Words", ("what", "is"), ((EVIL, "x"), ("back\\slash", "two\nlines"))),
    ),
    drawings=(Drawing("curves", "Curves in [0, 1] & <b>", two_curves),),
    numbers={"errors": [0.1, 0.2], "by class": {"0": {"error": 1e-300}}, "none": None},
    seconds=83.4,
)
PLAIN = dataclasses.replace(TOY, name="figure-1", title="Figure 1: another", comparisons=(), drawings=())


@pytest.fixture(scope="module")
def provenance():
    settings = Settings(Path("nowhere"), LocalEngine(["cpu"]), torch.device("cpu"), seed=3)
    return Origin.of(settings, "python -m reproduction `table-9` | tee")


@pytest.fixture(scope="module")
def folder(provenance, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduced") / "new"
    for outcome in (TOY, PLAIN):
        write_outcome(outcome, provenance, folder)
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return write_page(folder, ["figure-1", "never-run", "table-9"]).read_text(encoding="utf-8")


def test_files_are_all_there_and_nothing_else(provenance, tmp_path):
    written = write_outcome(TOY, provenance, tmp_path / "deep" / "folder")
    assert sorted(path.name for path in written) == FILES
    assert sorted(path.name for path in (tmp_path / "deep" / "folder" / "table-9").iterdir()) == FILES
    assert written[-1].name == "summary.json"  # last: where it is, the rest is


def test_the_summary_can_be_read_again(folder, provenance):
    record = json.loads((folder / "table-9" / "summary.json").read_text())
    assert [item["difference"] for item in record["comparisons"]] == [0.125 - 0.1, None]
    assert record["drawings"] == [
        {"name": "curves", "caption": "Curves in [0, 1] & <b>", "png": "curves.png", "pdf": "curves.pdf"}
    ]
    assert record["numbers"] == TOY.numbers
    assert record["provenance"]["command"] == provenance.command
    assert read_summary(folder / "table-9" / "summary.json") == summary_of(TOY, provenance)


def test_a_summary_from_before_commits_were_noted_is_read(folder, provenance, tmp_path):
    record = json.loads((folder / "table-9" / "summary.json").read_text())
    assert record["provenance"].pop("commit") == provenance.commit
    old = tmp_path / "table-9" / "summary.json"
    old.parent.mkdir()
    old.write_text(json.dumps(record))
    found = read_summary(old)
    assert found.provenance == dataclasses.replace(provenance, commit=UNKNOWN)
    assert f"commit {UNKNOWN}, torch " in as_markdown(found)


class TestCommit:
    @pytest.fixture(autouse=True)
    def _asked_anew(self, monkeypatch):
        monkeypatch.delenv(COMMIT, raising=False)
        commit_here.cache_clear()
        yield
        commit_here.cache_clear()

    def copy(self, monkeypatch, folder: Path) -> Path:
        monkeypatch.setattr(experiment, "ROOT", folder)
        return folder

    def git(self, folder: Path, *words: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", "-C", str(folder), *named, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def test_of_a_checkout(self, monkeypatch, tmp_path):
        here = self.copy(monkeypatch, tmp_path.resolve())
        self.git(here, "init", "--quiet")
        (here / "file").write_text("1")
        self.git(here, "add", "file")
        self.git(here, "commit", "--quiet", "-m", "first")
        commit = self.git(here, "rev-parse", "HEAD")
        assert commit_here() == commit
        (here / "file").write_text("2")
        commit_here.cache_clear()
        assert commit_here() == f"{commit} with changes"

    def test_of_a_copy_inside_another_checkout_what_the_variable_says(self, monkeypatch, tmp_path):
        self.git(tmp_path, "init", "--quiet")
        (tmp_path / "copy").mkdir()
        self.copy(monkeypatch, tmp_path.resolve() / "copy")
        assert commit_here() == UNKNOWN
        commit_here.cache_clear()
        monkeypatch.setenv(COMMIT, "abc")
        assert commit_here() == "abc"

    def test_without_git(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert commit_here() == UNKNOWN

    def test_of_what_earlier_runs_computed(self, tmp_path):
        folder = tmp_path / "a"
        folder.mkdir()
        lines = [{"device": "x", "torch": "2", "commit": "abc"}, {"device": "x", "torch": "2"}]
        (folder / RUNS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = Settings(tmp_path, LocalEngine(["cpu"]), torch.device("cpu"), used=["a"])
        assert commits(tmp_path, ["a"]) == ["abc", UNKNOWN]
        assert Origin.of(settings, "x").commit == f"abc and {UNKNOWN}"
        assert Origin.of(dataclasses.replace(settings, used=[]), "x").commit == commit_here()


def test_pictures_show_something_and_repeat_to_the_byte(folder, provenance, tmp_path):
    write_outcome(TOY, provenance, tmp_path)
    for name in ("curves.png", "curves.pdf"):
        assert (tmp_path / "table-9" / name).read_bytes() == (folder / "table-9" / name).read_bytes()
    assert (folder / "table-9" / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert b"CreationDate" not in (folder / "table-9" / "curves.pdf").read_bytes()
    with Image.open(folder / "table-9" / "curves.png") as picture:
        assert picture.width > 800
        assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
        assert len(picture.convert("RGB").getcolors(2**24)) > 20


def test_drawing_leaves_pyplot_alone(folder):
    from matplotlib import pyplot

    assert pyplot.get_fignums() == []


def test_markdown_is_shown_as_it_was_meant(folder, provenance):
    text = (folder / "table-9" / "table.md").read_text()
    lines = text.splitlines()
    assert lines[0] == "# Table 9: a toy"
    assert "Pixels are in [0,1]." in lines
    assert "| what | ours | paper | difference |" in lines
    assert "| error of P(a\\|b) | 0.125 | 0.1 | +0.025 |" in lines
    assert "| kernel | 2.2e-16 | — | — |" in lines
    assert "| class | error \\|ρ\\| ≤ 0.5 | time |" in lines
    assert "| a\\|b | **1.5e-7** | — |" in lines
    assert "| [red]avg |  | 2 s |" in lines  # nothing is not made bold
    assert "| --- | ---: | ---: |" in lines
    assert "| back\\\\slash | two lines |" in lines
    assert "Caption of \\*one\\*" in lines
    assert "![Curves in \\[0, 1\\] & &lt;b>](curves.png)" in lines
    assert "<script" not in text
    assert any(line.startswith("\\- not a list") for line in lines)
    assert lines[-1].startswith("`` python -m reproduction `table-9` | tee `` · netmoments ")
    assert f", commit {provenance.commit}, torch " in lines[-1]
    assert lines[-1].endswith(f"seed 3 · {provenance.date} · {provenance.device} · 1 min 23 s of work")
    for line in lines[:-1]:
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 5)


def test_markdown_without_comparisons_has_no_table_of_them(provenance):
    assert "difference" not in as_markdown(summary_of(PLAIN, provenance))


@pytest.mark.parametrize(
    ("text", "shown"),
    [("[a](b)", "[a]\\(b)"), ("&lt;", "&amp;lt;"), ("a & b < c", "a & b < c"), ("$x_1$", "\\$x\\_1\\$")],
)
def test_plain_text_in_markdown(text, shown):
    assert plain(text) == shown


def test_the_page_holds_everything_in_order(page):
    assert page.count("<section") == 2
    assert page.index('<section id="figure-1">') < page.index('<section id="table-9">')
    assert page.index('href="#figure-1"') < page.index('href="#table-9"')
    assert page.count("data:image/png;base64,") == 1
    for part in ("The paper&#39;s experiments", "+0.025", "2.2e-16", "1 min 23 s", "Caption of *one*", "Pixels are in"):
        assert part.replace("&#39;", "'") in page
    assert 'alt="Curves in [0, 1] &amp; &lt;b&gt;"' in page
    assert '<tr class="break"><th scope="row" class="">[red]avg</th>' in page
    assert '<td class="number strong">1.5e-7</td>' in page


def test_the_page_is_self_contained_and_escapes(page):
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", page)
    assert links
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert not re.search(r"http(?!-equiv)|url\(|@import", page)
    assert page.index("Content-Security-Policy") < page.index("<style")
    assert all(f'id="{link[1:]}"' in page for link in links if link.startswith("#"))


def test_long_lists_are_cut_in_the_overview_only(provenance, tmp_path):
    many = tuple(BesidePaper(f"number {k}", k, 1.0) for k in range(11))
    write_outcome(dataclasses.replace(PLAIN, comparisons=many), provenance, tmp_path)
    overview, section = write_page(tmp_path, ["figure-1"]).read_text().split("<section", 1)
    assert "number 7" in overview
    assert "number 8" not in overview
    assert "and 3 more" in overview
    assert "<details" in section
    assert all(f">number {k}<" in section for k in range(11))


def test_what_cannot_be_written_leaves_what_was_there(provenance, tmp_path):
    before = write_outcome(TOY, provenance, tmp_path)
    contents = [path.read_bytes() for path in before]
    with pytest.raises(ValueError, match="table-9 cannot be written as JSON"):
        write_outcome(dataclasses.replace(TOY, numbers={"a": [float("nan")]}, title="new"), provenance, tmp_path)
    with pytest.raises(TypeError, match="table-9 cannot be written as JSON"):
        write_outcome(dataclasses.replace(TOY, numbers={"a": torch.ones(2)}), provenance, tmp_path)
    broken = Drawing("curves", "", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_outcome(dataclasses.replace(TOY, drawings=(broken,)), provenance, tmp_path)
    assert [path.read_bytes() for path in before] == contents
    assert sorted(path.name for path in (tmp_path / "table-9").iterdir()) == FILES
    with pytest.raises(ValueError, match="table-9 cannot be written as JSON"):
        write_outcome(dataclasses.replace(TOY, numbers={"a": float("inf")}), provenance, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_full_disk_leaves_the_last_outcome(provenance, tmp_path, monkeypatch):
    """The pictures fit, the rest does not: nothing of the new one is there."""
    before = {path: path.read_bytes() for path in write_outcome(TOY, provenance, tmp_path)}
    plain = Path.write_bytes

    def until_full(self: Path, content: bytes) -> int:
        if "table.md" in self.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(self, content)

    monkeypatch.setattr(Path, "write_bytes", until_full)
    with pytest.raises(OSError, match=r"table\.md could not be written: No space left on device"):
        write_outcome(dataclasses.replace(TOY, title="new"), provenance, tmp_path)
    assert {path: path.read_bytes() for path in (tmp_path / "table-9").iterdir()} == before
    with pytest.raises(OSError, match=r"table\.md could not be written"):
        write_outcome(TOY, provenance, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_line_that_was_cut_short_does_not_take_the_next_with_it(tmp_path):
    """Which machine computed a sweep is appended to a file, perhaps on a disk that was full before."""
    sweep, runs = SimpleNamespace(name="toy"), tmp_path / "toy" / RUNS
    runs.parent.mkdir()
    recorded = [
        Recorded(SimpleNamespace(results=lambda *_: iter(())), tmp_path, Machine(name, "2.13")) for name in ("a", "b")
    ]
    list(recorded[0].results(sweep, []))
    runs.write_bytes(runs.read_bytes() + b'{"date": "2026')
    list(recorded[1].results(sweep, []))
    assert machines(tmp_path, ["toy"]) == [Machine("a", "2.13"), Machine("b", "2.13")]
    runs.unlink()
    runs.mkdir()
    with pytest.raises(OSError, match=rf"{RUNS} could not be written: Is a directory"):
        list(recorded[0].results(sweep, []))


DAMAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not a summary": lambda text: "[1, 2]",
    "a key missing": lambda text: text.replace('"reading"', '"writing"'),
    "a word for a number": lambda text: text.replace('"ours": 0.125', '"ours": "much"'),
    "other provenance": lambda text: text.replace('"seed"', '"seeds"'),
    "a cell missing": lambda text: text.replace('"a|b",', ""),
    "a picture elsewhere": lambda text: text.replace('"name": "curves"', '"name": "../curves"'),
    "another experiment's": lambda text: text.replace('"table-9"', '"table-8"'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_summary_is_named(folder, tmp_path, kind):
    path = tmp_path / "table-9" / "summary.json"
    path.parent.mkdir()
    text = (folder / "table-9" / "summary.json").read_text()
    assert DAMAGE[kind](text) != text
    path.write_text(DAMAGE[kind](text))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is damaged .*reproduce table-9 again"):
        write_page(tmp_path, ["table-9"])
    assert not (tmp_path / "report.html").exists()


def test_missing_and_damaged_pictures_are_named(provenance, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing to put on the page"):
        write_page(tmp_path, ["table-9"])
    picture, *_ = write_outcome(TOY, provenance, tmp_path)
    picture.write_bytes(picture.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"curves\.png is not a whole PNG"):
        write_page(tmp_path, ["table-9"])
    picture.unlink()
    with pytest.raises(FileNotFoundError, match=r"curves\.png"):
        write_page(tmp_path, ["table-9"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../up"}, "cannot be a file's name"),
        ({"drawings": TOY.drawings * 2}, "two drawings of table-9 have one name"),
        ({"panels": (Panel("P", ("a", "b"), (("1", "2"), ("3",))),)}, "row 1 of the panel 'P' has 1 cells for 2"),
    ],
)
def test_outcomes_that_make_no_sense_are_explained(provenance, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        write_outcome(dataclasses.replace(TOY, **change), provenance, tmp_path)
    assert not list(tmp_path.iterdir())


def shown(outcome, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(draw(outcome))
    return console.export_text()


def test_the_terminal_shows_every_part(provenance):
    text = shown(TOY, 100)
    parts = ("Table 9: a toy", "[0,1]", "+0.025", "2.2e-16", "[bold]all[/bold]", "[red]avg", "0.2 ± 0.1", "of *one*")
    for part in (*parts, EVIL):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("width", [200, 100, 60])
def test_no_cell_of_a_wide_panel_is_lost(width):
    columns = ("σ", "class", *(f"variance of method {k}" for k in range(9)))
    rows = tuple(("0.1", name, *(f"{k}.123 ± 0.{row}56" for k in range(9))) for row, name in enumerate(("a", "avg")))
    text = shown(dataclasses.replace(TOY, panels=(Panel("Wide", columns, rows),)), width)
    assert all(cell in text for row in rows for cell in row)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("name", ["attack_rows", "figure_8", "table_5", "writing"])
def test_examples_in_docstrings(name):
    found = doctest.testmod(importlib.import_module(f"reproduction.{name}"))
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"), (-0.0, "0"), (1, "1"), (0.1, "0.1"), (0.12345, "0.123"), (-12.345, "-12.3"), (999.6, "1,000"),
        (1234.5, "1,234"), (60000, "60,000"), (-1234567, "-1,234,567"), (2.5e9, "2.5e9"), (0.00123, "0.00123"),
        (0.00099999, "0.001"), (2.2e-16, "2.2e-16"), (2.228e-308, "2.23e-308"), (-1e-5, "-1e-5"),
        (float("nan"), "nan"), (float("inf"), "∞"), (float("-inf"), "-∞"),
    ],
)  # fmt: skip
def test_numbers_in_words(value, words):
    assert in_words(value) == words
    assert number_columns(["x"], [[words]]) == (True,)


def test_differences_have_a_sign():
    assert [difference_in_words(x) for x in (0.5, -0.5, 0.0, None, 1e-9)] == ["+0.5", "-0.5", "0", "—", "+1e-9"]


@pytest.mark.parametrize(
    "cell", ["0.1 ± 0.02", "12%", "< 1e-6", "3 ms", "0.20 (0.14)", "+7", "−0.3", "[0.1, 0.2]", "2×"]
)
def test_cells_that_are_numbers(cell):
    assert number_columns(["x"], [[cell], [""], ["—"]]) == (True,)


@pytest.mark.parametrize(
    "cell", ["avg", "3 layers", "LeNet-5", "1" * 5000 + " layers", "1," * 5000 + " layers", "relu3", "a"]
)
def test_cells_that_are_words(cell):
    assert number_columns(["x"], [["1"], [cell]]) == (False,)
    assert number_columns(["x"], [[""]]) == (False,)


def test_columns_of_numbers():
    columns = ["a", "b", "c", "d", "e"]
    rows = [["1", "0.2 ± 0.1", "x1", "—", ""], ["-2e-3 %", "> 99.9%", "2", "1,000", ""]]
    assert number_columns(columns, rows) == (True, True, False, True, False)

"""The documents are true: code runs, commands exist, links lead somewhere, and numbers are in the records they cite."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from netmoments import cli
from reproduction import cli as reproduction_cli
from reproduction.experiment import NAMES

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [README, CONTRIBUTING, *DOCS]
MOST_WORDS, EXAMPLE_LINES = 600, 8
SETTINGS = {"0.05", "1,000", "10,000"}
"""Numbers in the README's prose that nobody measured: a noise level and numbers of samples. Others have a source."""
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?")


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line it starts at."""

    language: str
    text: str
    line: int


class Link(NamedTuple):
    """`[text](target "title")`."""

    text: str
    target: str
    title: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [Block(each[1], each[2], text.count("\n", 0, each.start()) + 1) for each in found]


def prose(path: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)


def links(text: str) -> list[Link]:
    found = re.finditer(r'\[([^\]]*)\]\(([^)\s]+)(?: "([^"]*)")?\)', text)
    return [Link(each[1], each[2], each[3] or "") for each in found]


def code_spans(path: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(path))


def documents(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.relative_to(ROOT).as_posix())


# Size and shape


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= MOST_WORDS


def test_the_readme_has_the_two_commands_one_example_and_one_picture():
    text = README.read_text()
    assert "$ make demo" in text
    assert "$ make test" in text
    (example,) = [block for block in blocks(README) if block.language == "python"]
    assert len([line for line in example.text.splitlines() if line]) <= EXAMPLE_LINES
    (picture,) = re.findall(r"!\[[^\]]+\]\((\S+)\)", text)
    assert (ROOT / picture).stat().st_size < 200_000


# Code


@pytest.fixture
def clean_process(monkeypatch, tmp_path) -> Iterator[None]:
    """An empty folder, no data anywhere, a terminal of 100 columns, and one thread: the networks are small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NETMOMENTS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(path: Path, namespace: dict[str, object]) -> Iterator[tuple[str, str]]:
    """What every Python block of a document prints, all in one namespace, and what the document says it prints."""
    for block, after in itertools.pairwise([*blocks(path), Block("", "", 0)]):
        if block.language != "python":
            continue
        printed = io.StringIO()
        program = compile("\n" * block.line + block.text, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(program, namespace)
        yield printed.getvalue(), after.text if after.language == "text" else ""


@documents(DOCUMENTS)
def test_python_blocks_run_and_print_what_is_shown(path, clean_process):
    if path.name == "experiments.md":
        assert not [block for block in blocks(path) if block.language == "python"]
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for printed, shown in run(path, {"__name__": "example"}):
            assert not shown or printed == shown


# Commands


def commands(path: Path) -> list[list[str]]:
    """Those of console blocks, and of code in the prose; words in capitals stand for something else."""
    lines = [line[2:] for block in blocks(path) for line in block.text.splitlines() if line.startswith("$ ")]
    lines += [span for span in code_spans(path) if re.match(r"(netmoments|python -m|make) [\w-]", span)]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if not any(word.isupper() for word in line)]


@pytest.mark.parametrize("command", [line for line in commands(README) if line[0] == "netmoments"], ids=" ".join)
def test_commands_of_the_readme_run(command, clean_process, capsys):
    cli.app(command[1:], result_action="return_value", exit_on_error=False)
    assert capsys.readouterr().out.strip()
    if command[1] in ("report", "attack"):
        assert list(Path.cwd().glob(f"*/{command[1]}.html"))


@documents([*DOCUMENTS, ROOT / "results" / "README.md"])
def test_commands_exist(path):
    for program, *arguments in commands(path):
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M), arguments
        elif program == "netmoments":
            cli.app.parse_args(arguments, exit_on_error=False, print_error=False)
        elif arguments[:2] == ["-m", "reproduction"]:
            name = arguments[2]
            assert name in {*NAMES, "all", "train", "engine"}, arguments
            reproduction_cli.app.parse_args(arguments[2:], exit_on_error=False, print_error=False)
        elif program == "python":
            assert arguments[0] == "-m"
            assert importlib.util.find_spec(arguments[1]), arguments


# Links and names


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}


@documents([*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "results" / "README.md"])
def test_links_lead_somewhere(path):
    for link in links(prose(path)):
        if re.match(r"https?:", link.target):
            continue
        file, _, anchor = link.target.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def require_name(name: str) -> None:
    """That `nm.this.that` or `netmoments.room.module` is there."""
    module, *parts = re.sub(r"^nm\b", "netmoments", name).split(".")
    found = importlib.import_module(module)
    for part in parts:
        module = f"{module}.{part}"
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
        assert hasattr(found, part), f"{name}: there is no {module}"
        found = getattr(found, part)


def names(text: str) -> list[str]:
    return re.findall(r"(?<![\w./\"])(?:nm|netmoments|benchmarks|reproduction)(?:\.\w+)+", text)


@documents(DOCUMENTS)
def test_names_and_files_in_code_exist(path):
    for span in code_spans(path):
        for name in names(span):
            require_name(name)
        if re.fullmatch(r"(netmoments|reproduction|benchmarks|tests|results|docs)/[\w/.-]*", span):
            assert (ROOT / span).exists(), span


def test_new_names_of_the_changelog_exist():
    """The last column of its table, which says what old names have become."""
    rows = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("| `")]
    found = [name for row in rows for name in names(row.rpartition(" | ")[2])]
    assert "nm.TwoStage" in found
    for name in found:
        require_name(name)


# Numbers


def quoted(text: str) -> Decimal:
    return Decimal(text.replace("−", "-").replace(",", ""))


def in_words(text: str, number: str) -> bool:
    """Whether a text has this number, or one that rounds to it."""
    wanted = quoted(number)
    half = Decimal(5).scaleb(wanted.as_tuple().exponent - 1)
    return any(abs(quoted(each) - wanted) <= half for each in NUMBER.findall(text))


def section(text: str, anchor: str) -> list[list[str]]:
    """The rows of the table under a heading, without emphasis."""
    for part in re.split(r"^#+ ", text, flags=re.M):
        heading = part.partition("\n")[0]
        if re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") == anchor:
            rows = [line for line in part.splitlines() if line.startswith("|")]
            return [[cell.strip(" *") for cell in line.strip("|").split(" | ")] for line in rows]
    raise AssertionError(f"no heading gives #{anchor}")


def only(found: list[str], wanted: str) -> str:
    """The one that is what is wanted, or the only one that has it in it."""
    exact = [each for each in found if each == wanted] or [each for each in found if wanted in each]
    assert len(exact) == 1, f"{wanted!r} is {len(exact)} times among {found}"
    return exact[0]


def recorded(link: Link, path: Path) -> str:
    """What a record has where a link says: `row: column` of a Markdown table, or the line of a text that begins so."""
    file, _, anchor = link.target.partition("#")
    text = (path.parent / file).read_text()
    if not anchor:
        lines = [line.strip() for line in text.splitlines()]
        found = [line.removeprefix(link.title) for line in lines if line.startswith(link.title)]
        assert len(found) == 1, f"{link}: {len(found)} lines begin so"
        return re.split(r" {3,}", found[0], maxsplit=1)[-1]
    head, _, *rows = section(text, anchor)
    row, column = link.title.split(": ")
    chosen = only([cells[0] for cells in rows], row)
    (cells,) = [cells for cells in rows if cells[0] == chosen]
    return cells[head.index(only(head, column))]


def is_record(target: str) -> bool:
    return re.match(r"(\.\./)?(results/[\w-]+/|benchmarks/records/)", target) is not None


@documents([README])
def test_numbers_that_are_quoted_are_in_the_record(path):
    sources = [link for link in links(prose(path)) if is_record(link.target)]
    assert len(sources) >= 5
    for link in sources:
        assert in_words(recorded(link, path), link.text), f"{link} has {recorded(link, path)}"


def test_no_number_of_the_readme_is_without_a_source():
    text = re.sub(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`", "", prose(README))
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert set(NUMBER.findall(text)) <= SETTINGS | {required.removeprefix(">=")}


def tables(path: Path) -> list[tuple[str, list[list[str]]]]:
    """Tables with the paragraph above them."""
    paragraphs = re.split(r"\n\n+", prose(path))
    return [
        (before, [line.strip("|").split("|") for line in table.splitlines()[2:]])
        for before, table in itertools.pairwise(paragraphs)
        if table.startswith("|")
    ]


@documents([path for path in DOCS if path.name != "experiments.md"])
def test_tables_below_a_record_have_its_numbers(path):
    """A table whose paragraph cites records: every number of its cells, beside the first, is in one of these."""
    for before, rows in tables(path):
        sources = [link.target.partition("#")[0] for link in links(before) if is_record(link.target)]
        records = "\n".join((path.parent / source).read_text() for source in sources)
        for row in rows if sources else []:
            for number in NUMBER.findall(" ".join(row[1:])):
                assert in_words(records, number), f"{number} of {row[0].strip()!r} is not in {sources}"


def test_the_check_of_numbers_notices():
    assert in_words("0.275  reached", "0.28")
    assert in_words("4.7e-06", "5e-6")
    assert not in_words("0.0027", "0.0028")
    assert not in_words("0.0027", "0.0026")
    assert in_words("1,234.5", "1,234")

"""Write outcomes as files, show them on a page and in a terminal."""

from __future__ import annotations

import base64
import json
import re
import shlex
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from netmoments.files import require_writable_folder, write_files_whole, write_text_whole
from netmoments.report.page import shown
from netmoments.report.pictures import DPI, figure_png, saved_figure
from netmoments.report.words import in_words, seconds_in_words
from reproduction.experiment import NAMES, BesidePaper, Drawing, Origin, Outcome, Panel, Settings, reproduce

SUMMARY = "summary.json"
COMPARISON_COLUMNS = ("what", "ours", "paper", "difference")
NOTHING = "—"
"""Shown where there is no number."""

_NUMBER = r"(?>[(\[]?[<>≤≥≈~±+−-]?\s?(?:\d[\d,.]*(?:e[+−-]?\d+)?|nan|inf|∞)(?:\s?(?:%|×|[a-zµμ]{1,2}\b))?[)\]]?)"
_CELL = re.compile(rf"(?:[—-]|{_NUMBER}(?:\s*[±/–;]?\s*{_NUMBER})*+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Picture:
    """A drawing in files: `<name>.png` to look at, `<name>.pdf` to print."""

    name: str
    caption: str

    @property
    def png(self) -> str:
        return f"{self.name}.png"

    @property
    def pdf(self) -> str:
        return f"{self.name}.pdf"


@dataclass(frozen=True)
class Summary:
    """What is written about an outcome, and read back for the page."""

    name: str
    title: str
    reading: tuple[str, ...]
    comparisons: tuple[BesidePaper, ...]
    panels: tuple[Panel, ...]
    pictures: tuple[Picture, ...]
    numbers: dict[str, Any]
    seconds: float
    provenance: Origin

    def __post_init__(self) -> None:
        names = [picture.name for picture in self.pictures]
        for name in (self.name, *names):
            _require_file_name(name)
        if len(set(names)) < len(names):
            raise ValueError(f"two drawings of {self.name} have one name: {', '.join(names)}")
        for panel in self.panels:
            _require_rectangle(panel)


def summary_of(outcome: Outcome, provenance: Origin) -> Summary:
    return Summary(
        outcome.name,
        outcome.title,
        outcome.reading,
        outcome.comparisons,
        (*outcome.panels, *outcome.details),
        tuple(Picture(drawing.name, drawing.caption) for drawing in outcome.drawings),
        outcome.numbers,
        outcome.seconds,
        provenance,
    )


def comparison_cells(item: BesidePaper) -> tuple[str, ...]:
    """The cells of a comparison, for `COMPARISON_COLUMNS`."""
    paper = NOTHING if item.paper is None else in_words(item.paper)
    return item.what, in_words(item.ours), paper, difference_in_words(item.difference)


def difference_in_words(value: float | None) -> str:
    """A difference in words, with its sign.

    >>> [difference_in_words(value) for value in (0.0123, -2.0, 0.0, None)]
    ['+0.0123', '-2', '0', '—']
    """
    if value is None:
        return NOTHING
    return f"+{in_words(value)}" if value > 0 else in_words(value)


def number_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[bool, ...]:
    """For each column, whether its cells are numbers (with errors, units or nothing), which are aligned to the right.

    >>> number_columns(["class", "error"], [["1", "0.2 ± 0.1"], ["avg", "—"]])
    (False, True)
    """
    return tuple(
        any(row[place].strip() for row in rows) and all(_CELL.fullmatch(row[place].strip()) for row in rows)
        for place in range(len(columns))
    )


def as_json(summary: Summary) -> str:
    """The summary as JSON; a number that is not finite is an error, since JSON has none."""
    record = {
        "name": summary.name,
        "title": summary.title,
        "reading": summary.reading,
        "comparisons": [{**asdict(item), "difference": item.difference} for item in summary.comparisons],
        "panels": [asdict(panel) for panel in summary.panels],
        "drawings": [{**asdict(item), "png": item.png, "pdf": item.pdf} for item in summary.pictures],
        "numbers": summary.numbers,
        "seconds": summary.seconds,
        "provenance": asdict(summary.provenance),
    }
    try:
        return _pretty(record) + "\n"
    except (TypeError, ValueError) as error:
        raise type(error)(f"{summary.name} cannot be written as JSON: {error}") from error


def _pretty(value: Any, depth: int = 0) -> str:
    """JSON with one line an entry, but lists of plain values on a line of their own."""
    nested = (
        value if isinstance(value, (list, tuple)) and any(isinstance(x, (dict, list, tuple)) for x in value) else ()
    )
    entries = [_pretty(x, depth + 1) for x in nested]
    if isinstance(value, dict):
        entries = [f"{json.dumps(str(key), ensure_ascii=False)}: {_pretty(x, depth + 1)}" for key, x in value.items()]
    if not entries:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    lines = f",\n{' ' * (depth + 1)}".join(entries)
    return f"{opening}\n{' ' * (depth + 1)}{lines}\n{' ' * depth}{closing}"


def read_summary(path: Path) -> Summary:
    """Read a summary from its file; anything wrong is an error that names the file."""
    text = path.read_bytes()
    try:
        summary = _summary_from(json.loads(text))
        if summary.name != path.parent.name:
            raise ValueError(f"it is about {summary.name}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        again = f"reproduce {path.parent.name} again"
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {again}") from error
    return summary


def _summary_from(record: dict[str, Any]) -> Summary:
    return Summary(
        str(record["name"]),
        str(record["title"]),
        tuple(map(str, record["reading"])),
        tuple(_comparison_from(item) for item in record["comparisons"]),
        tuple(_panel_from(item) for item in record["panels"]),
        tuple(Picture(str(item["name"]), str(item["caption"])) for item in record["drawings"]),
        dict(record["numbers"]),
        float(record["seconds"]),
        Origin(**record["provenance"]),
    )


def _comparison_from(record: dict[str, Any]) -> BesidePaper:
    paper = record["paper"]
    return BesidePaper(str(record["what"]), float(record["ours"]), None if paper is None else float(paper))


def _panel_from(record: dict[str, Any]) -> Panel:
    return Panel(
        str(record["title"]),
        tuple(map(str, record["columns"])),
        tuple(tuple(map(str, row)) for row in record["rows"]),
        str(record["caption"]),
        tuple(map(int, record["emphasis"])),
        tuple(map(int, record["breaks"])),
    )


def _require_file_name(name: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise ValueError(f"{name!r} cannot be a file's name; use letters, digits, dashes and underscores")


def _require_rectangle(panel: Panel) -> None:
    for number, row in enumerate(panel.rows):
        if len(row) != len(panel.columns):
            raise ValueError(
                f"row {number} of the panel {panel.title!r} has {len(row)} cells for {len(panel.columns)} columns"
            )


def as_markdown(summary: Summary) -> str:
    """Title, reading, comparisons, figures, panels, and a last line that says where it all came from."""
    blocks = [f"# {plain(summary.title)}", *map(_markdown_paragraph, summary.reading)]
    if summary.comparisons:
        blocks += [
            "## Beside the paper",
            table(COMPARISON_COLUMNS, [comparison_cells(item) for item in summary.comparisons]),
        ]
    for picture in summary.pictures:
        blocks += _markdown_picture(picture)
    for panel in summary.panels:
        blocks += _markdown_panel(panel)
    return "\n\n".join([*blocks, _markdown_origin(summary)]) + "\n"


def plain(text: str) -> str:
    """Escape text, on one line, so that Markdown shows it as it is, also inside a table.

    >>> print(plain("P(a|b) of *x* in <b>, < 1e-6"))
    P(a\\|b) of \\*x\\* in &lt;b>, < 1e-6
    """
    text = re.sub(r"([\\`*_|$~])", r"\\\1", " ".join(text.split()))
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", text).replace("](", r"]\(")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], emphasis: Sequence[int] = ()) -> str:
    """Cells in words as a Markdown table: numbers to the right, the columns of `emphasis` bold."""
    rule = ["---:" if number else "---" for number in number_columns(columns, rows)]
    lines = [[plain(column) for column in columns], rule]
    for row in rows:
        cells = [plain(cell) for cell in row]
        lines.append([f"**{cell}**" if k in emphasis and cell else cell for k, cell in enumerate(cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_paragraph(text: str) -> str:
    """Plain text that does not begin a heading, a list or a quotation."""
    text = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", plain(text))
    return re.sub(r"^(#|>|[+-](?=\s|$)|[=-]+$)", r"\\\1", text)


def _markdown_picture(picture: Picture) -> list[str]:
    words = re.sub(r"([\[\]])", r"\\\1", plain(picture.caption))
    link = f"([PDF]({picture.pdf}))"
    return [f"![{words}]({picture.png})", f"{_markdown_paragraph(picture.caption)} {link}".lstrip()]


def _markdown_panel(panel: Panel) -> list[str]:
    blocks = [f"## {plain(panel.title)}", table(panel.columns, panel.rows, panel.emphasis)]
    return [*blocks, _markdown_paragraph(panel.caption)] if panel.caption else blocks


def _markdown_origin(summary: Summary) -> str:
    """Command, versions, commit, seed, date, device and time on one line."""
    origin = summary.provenance
    facts = (
        f"netmoments {origin.netmoments}, commit {origin.commit}, torch {origin.torch}, Python {origin.python}",
        f"seed {origin.seed}",
        origin.date,
        origin.device,
        f"{seconds_in_words(summary.seconds)} of work",
    )
    return " · ".join([_code(origin.command), *map(plain, facts)])


def _code(text: str) -> str:
    """Text as code, fenced by more backticks than it has in a row."""
    text = " ".join(text.split())
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"{fence}{text}{fence}"


TEMPLATE = Path(__file__).parent / "templates" / "reproduction.html"
SHOWN = 8
"""The most comparisons of one experiment in the overview; its section has them all."""
SHOWN_WHOLE = 50
"""The most rows of a panel that are shown whole; one with more scrolls under its heading."""


def render_page(found: Sequence[tuple[Summary, Path]]) -> str:
    """The page as HTML text, from summaries and the folders with their pictures."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=shown
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        subtitle=_subtitle([summary for summary, _ in found]),
        experiments=[_experiment(summary, folder) for summary, folder in found],
        columns=COMPARISON_COLUMNS,
        shown=SHOWN,
        shown_whole=SHOWN_WHOLE,
    )


def _subtitle(found: Sequence[Summary]) -> str:
    """The paper, the days of the first and the last result, the machines."""
    days = sorted({summary.provenance.date.split(" ")[0] for summary in found})
    devices = dict.fromkeys(summary.provenance.device for summary in found)
    return ", ".join(["Network Moments", " to ".join(dict.fromkeys((days[0], days[-1]))), *devices])


def _experiment(summary: Summary, folder: Path) -> dict[str, Any]:
    return {
        "name": summary.name,
        "title": summary.title,
        "reading": summary.reading,
        "comparisons": [comparison_cells(item) for item in summary.comparisons],
        "pictures": [_picture(picture, folder) for picture in summary.pictures],
        "panels": [_panel(panel) for panel in summary.panels],
        "command": summary.provenance.command,
        "origin": _origin(summary),
    }


def _panel(panel: Panel) -> dict[str, Any]:
    """A panel as HTML, each cell with its classes: numbers to the right, emphasis bold."""
    kinds = [
        " ".join(["number"] * number + ["strong"] * (place in panel.emphasis))
        for place, number in enumerate(number_columns(panel.columns, panel.rows))
    ]
    return {
        "title": panel.title,
        "caption": panel.caption,
        "columns": list(zip(panel.columns, kinds, strict=True)),
        "rows": [(number in panel.breaks, list(zip(row, kinds, strict=True))) for number, row in enumerate(panel.rows)],
    }


def _picture(picture: Picture, folder: Path) -> dict[str, Any]:
    """The PNG as a data URI, with the figure's size on paper."""
    path = folder / picture.png
    content = path.read_bytes()
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[-8:-4] != b"IEND":
        raise ValueError(f"{path} is not a whole PNG; reproduce {folder.name} again")
    width, height = (round(pixels * 96 / DPI) for pixels in struct.unpack(">II", content[16:24]))
    data = "data:image/png;base64," + base64.b64encode(content).decode()
    return {"data": data, "width": width, "height": height, "caption": picture.caption}


def _origin(summary: Summary) -> list[tuple[str, str]]:
    origin = summary.provenance
    return [
        ("netmoments", origin.netmoments),
        ("commit", origin.commit),
        ("torch", origin.torch),
        ("Python", origin.python),
        ("seed", str(origin.seed)),
        ("date", origin.date),
        ("device", origin.device),
        ("work", seconds_in_words(summary.seconds)),
    ]


PAGE = "report.html"


def write_outcome(outcome: Outcome, provenance: Origin, folder: Path) -> list[Path]:
    """The pictures, `table.md` and `summary.json` in `folder/<name>/`, which is made if need be.

    Everything is made before anything is written, and on disk before anything takes its final name, the summary last:
    if the summary is there, so is the rest. A full disk leaves what was there before.
    """
    summary = summary_of(outcome, provenance)
    record, text = as_json(summary), as_markdown(summary)
    contents: dict[str, bytes] = {}
    for drawing in outcome.drawings:
        contents |= figure_files(drawing)
    contents |= {"table.md": text.encode(), SUMMARY: record.encode()}
    return list(write_files_whole(folder / outcome.name, contents).values())


def write_page(folder: Path, names: Sequence[str]) -> Path:
    """`report.html` of all experiments that have a summary in the folder, in the order of `names`."""
    present = [folder / name for name in dict.fromkeys(names) if (folder / name / SUMMARY).exists()]
    if not present:
        raise FileNotFoundError(f"no experiment has a {SUMMARY} in {folder}: there is nothing to put on the page yet")
    page = render_page([(read_summary(place / SUMMARY), place) for place in present])
    write_text_whole(folder / PAGE, page)
    return folder / PAGE


READING_WIDTH = 100
MOST_COMPARISONS = 16


def draw(outcome: Outcome) -> RenderableType:
    """Print the reading, the numbers beside the paper's, and the panels."""
    parts: list[RenderableType] = [Text(outcome.title, style="bold")]
    parts += [Group(Text(), _terminal_paragraph(text)) for text in outcome.reading]
    if outcome.comparisons:
        parts += [Text(), Text("Beside the paper", style="bold"), _comparisons(outcome.comparisons)]
        if len(outcome.comparisons) > MOST_COMPARISONS:
            parts.append(Text(f"{len(outcome.comparisons) - MOST_COMPARISONS} more in table.md", style="dim"))
    for panel in outcome.panels:
        parts += [Text(), Text(panel.title, style="bold"), _Fitted(panel)]
        if panel.caption:
            parts.append(_terminal_paragraph(panel.caption, style="dim"))
    for panel in outcome.details:
        parts += [Text(), Text(f"{panel.title}: {len(panel.rows)} rows in table.md", style="dim")]
    return Group(*parts)


def _terminal_paragraph(text: str, style: str = "") -> Constrain:
    return Constrain(Text(text, style=style), READING_WIDTH)


def _comparisons(comparisons: Sequence[BesidePaper]) -> _Fitted:
    rows = tuple(comparison_cells(item) for item in comparisons[:MOST_COMPARISONS])
    return _Fitted(Panel("", COMPARISON_COLUMNS, rows, emphasis=(1,)))


@dataclass(frozen=True)
class _Fitted:
    """A panel that never cuts a cell: in a narrow terminal headings are broken, and then the panel becomes several
    tables.
    """

    panel: Panel

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def fits(table: Table) -> bool:
            return Measurement.get(console, options.update(max_width=10_000), table).minimum <= options.max_width

        whole = _table(self.panel, range(len(self.panel.columns)), {})
        if Measurement.get(console, options.update(max_width=10_000), whole).maximum <= options.max_width:
            yield whole
            return
        for places in self._divisions():
            tables = [_table(self.panel, part, self._narrowest()) for part in places]
            if all(map(fits, tables)):
                break
        yield from tables

    def _divisions(self) -> Iterator[list[list[int]]]:
        """All columns, then ever more groups of about the same size, each beginning with those that name the row."""
        numbers = number_columns(self.panel.columns, self.panel.rows)
        keys = list(range(numbers.index(False) + 1 if False in numbers[:3] else 1))
        others = list(range(len(keys), len(numbers)))
        for count in range(1, max(len(others), 1) + 1):
            ends = [round(len(others) * k / count) for k in range(count + 1)]
            yield [[*keys, *others[start:end]] for start, end in pairwise(ends)]

    def _narrowest(self) -> dict[int, int]:
        """The least widths of columns of numbers at which neither a number nor a word of a heading is broken."""
        numbers = number_columns(self.panel.columns, self.panel.rows)
        return {
            place: max(map(cell_len, [*name.split(), *(row[place] for row in self.panel.rows)]))
            for place, name in enumerate(self.panel.columns)
            if numbers[place]
        }


def _table(panel: Panel, places: Sequence[int], widths: Mapping[int, int]) -> Table:
    """Some columns of a panel, numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers = number_columns(panel.columns, panel.rows)
    for place in places:
        table.add_column(
            Text(panel.columns[place]),
            justify="right" if numbers[place] else "left",
            style="bold" if place in panel.emphasis else None,
            width=widths.get(place),
        )
    for following, row in enumerate(panel.rows, start=1):
        table.add_row(*(Text(row[place]) for place in places), end_section=following in panel.breaks)
    return table


def reproduce_and_write(
    names: Sequence[str],
    settings: Settings,
    *,
    show: Callable[[Outcome], None] = lambda outcome: None,
) -> Path:
    """Write each experiment's files as soon as it is done, and `report.html`, whose path is returned.

    What is finished stays when a later one is stopped: by the deadline of the settings (`Unfinished`),
    by the user, or by an error.
    """
    require_writable_folder(settings.out)
    require_installed(names)
    for name in names:
        settings.used.clear()
        outcome = reproduce(name, settings)
        show(outcome)
        write_outcome(outcome, Origin.of(settings, command_line()), settings.out)
        page = write_page(settings.out, NAMES)
    return page


def command_line() -> str:
    """What was typed to start this process."""
    return shlex.join(["python", "-m", "reproduction", *sys.argv[1:]])


def require_installed(names: Sequence[str]) -> None:
    """Require at the start what is needed at the end."""
    needed = {"matplotlib": "report", "jinja2": "report"}
    if set(names) - {"figure-1"}:
        needed["pyarrow"] = "sweeps"
    if "table-4" in names:
        needed["sklearn"] = "data"
    for module, extra in needed.items():
        if find_spec(module) is None:
            raise ImportError(f'{module} is needed and not installed: pip install "netmoments[{extra}]"')


def figure_files(drawing: Drawing) -> dict[str, bytes]:
    """Draw the figure once and save it as `<name>.png` for screens and `<name>.pdf` for paper."""
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    figure = drawing.draw()
    png = figure_png(figure)
    FigureCanvasPdf(figure)
    pdf = saved_figure(figure, "pdf", {"CreationDate": None})
    return {f"{drawing.name}.png": png, f"{drawing.name}.pdf": pdf}

"""A figure as the bytes of its files; the same figure gives the same bytes."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING

from netmoments.experiments.outcome import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200


def figure_files(drawing: Drawing) -> dict[str, bytes]:
    """The drawing, drawn once: `<name>.png` for screens and `<name>.pdf` for paper."""
    require_matplotlib()
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    figure = drawing.draw()
    png = figure_png(figure)
    FigureCanvasPdf(figure)
    pdf = _saved(figure, "pdf", {"CreationDate": None})
    return {f"{drawing.name}.png": png, f"{drawing.name}.pdf": pdf}


def figure_png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    return _saved(figure, "png", {"Software": None})


def require_matplotlib() -> None:
    """Said before the work is done, not after."""
    if find_spec("matplotlib") is None:
        raise ImportError('figures need matplotlib: pip install "netmoments[report]"')


def _saved(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", bbox_inches="tight", metadata=metadata)
    return buffer.getvalue()

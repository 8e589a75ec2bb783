"""A figure as the bytes of its files; the same figure gives the same bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from netmoments.experiments.outcome import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200


def figure_files(drawing: Drawing) -> dict[str, bytes]:
    """The drawing, drawn once: `<name>.png` for screens and `<name>.pdf` for paper."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_pdf import FigureCanvasPdf
    except ImportError:
        raise ImportError('figures need matplotlib: pip install "netmoments[report]"') from None
    figure = drawing.draw()
    FigureCanvasAgg(figure)
    png = _saved(figure, "png", {"Software": None})
    FigureCanvasPdf(figure)
    pdf = _saved(figure, "pdf", {"CreationDate": None})
    return {f"{drawing.name}.png": png, f"{drawing.name}.pdf": pdf}


def _saved(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", bbox_inches="tight", metadata=metadata)
    return buffer.getvalue()

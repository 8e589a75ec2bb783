"""Pages from templates: everything that is put in is escaped, and what is missing is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """A template of this package, filled in."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise ImportError('the page needs jinja2: pip install "netmoments[report]"') from None
    loader = FileSystemLoader(TEMPLATES, encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, loader=loader)
    return environment.get_template(template).render(**values)

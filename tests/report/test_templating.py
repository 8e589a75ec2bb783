"""Pages from templates: what is put in is escaped, what is missing is an error."""

from __future__ import annotations

import sys

import pytest

from netmoments.report import templating


@pytest.fixture
def template(tmp_path, monkeypatch):
    monkeypatch.setattr(templating, "TEMPLATES", tmp_path)
    (tmp_path / "page.html").write_text("<p>{{ name }}</p>\n", encoding="utf-8")
    return "page.html"


def test_values_are_escaped(template):
    assert templating.render(template, name="<σ>") == "<p>&lt;σ&gt;</p>"


def test_what_is_missing_is_an_error(template):
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError, match="'name' is undefined"):
        templating.render(template)


def test_jinja_is_asked_for(template, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r'pip install "netmoments\[report\]"'):
        templating.render(template, name="x")

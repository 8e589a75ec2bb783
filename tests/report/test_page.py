"""What pages are made of: templates, pictures, and charts as SVG at two widths."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
from functools import partial
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from netmoments.report import page
from netmoments.report.page import (
    MOST_MARKS,
    NARROW,
    WIDE,
    Axis,
    CurveMark,
    FlipMark,
    ScoreBar,
    accuracy_chart,
    bound_groups,
    csv_text,
    finite,
    flip_strip,
    for_any_screen,
    images_a_mark,
    png_data,
    scores_chart,
    share_limits,
    small_picture,
)

WIDTHS = [WIDE, NARROW]


@pytest.fixture
def template(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "TEMPLATES", tmp_path)
    (tmp_path / "page.html").write_text("<p>{{ name }}</p>\n", encoding="utf-8")
    return "page.html"


def test_values_are_escaped(template):
    assert page.render(template, name="<σ>") == "<p>&lt;σ&gt;</p>"


def test_options_are_not_broken_over_lines_and_the_rest_is_escaped(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "TEMPLATES", tmp_path)
    (tmp_path / "page.html").write_text("{{ said|whole_options }}", encoding="utf-8")
    said = page.render("page.html", said="<b> --rare all\x1b")
    assert said == '&lt;b&gt; <span class="option">--rare</span> all\\x1b'


def test_what_is_missing_is_an_error(template):
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError, match="'name' is undefined"):
        page.render(template)


def test_an_image_becomes_a_png(generator):
    for channels in (1, 3):
        image = torch.rand(channels, 4, 6, generator=generator)
        image[0, 0, 0], image[0, 0, 1] = 1.7, -0.3  # cut
        kind, _, data = png_data(image).partition(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
            pixels = np.asarray(picture).reshape(4, 6, channels)
        expected = (image.clamp(0, 1) * 255).round().permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(pixels, expected)


def test_large_images_become_small_pictures(generator):
    few = torch.rand(3, 32, 32, generator=generator)
    assert small_picture(few) == png_data(few)
    for shape, size in (((3, 224, 224), (75, 75)), ((1, 96, 60), (60, 96)), ((3, 500, 20), (4, 84))):
        kind, _, content = small_picture(torch.rand(shape, generator=generator)).partition(",")
        assert kind == "data:image/jpeg;base64"
        assert len(content) < 20_000
        with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
            assert picture.size == size
            assert picture.mode == ("L" if shape[0] == 1 else "RGB")


def test_data_in_a_page_ends_nothing():
    value = {"</script><b>": ["a&b", 1.5, math.inf, None, True, ("\x1b", "\u2028")], "n": {"x": "σ"}}
    block = str(page.data_block(value))
    assert not set("<>&\x1b\u2028") & set(block)
    read = json.loads(block)
    assert read == {"</script><b>": ["a&b", 1.5, None, None, True, [r"\x1b", r"\u2028"]], "n": {"x": "σ"}}


def test_scripts_are_allowed_by_what_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "TEMPLATES", tmp_path)
    (tmp_path / "a.js").write_text("alert('σ' < 1)\n", encoding="utf-8")
    code, allowed = page.script("a.js")
    assert code == "alert('σ' < 1)\n"
    assert allowed == "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def test_what_steers_a_terminal_is_spelt_out(template):
    assert page.render(template, name="a\x1b[31m\u202eb") == r"<p>a\x1b[31m\u202eb</p>"
    assert page.render(template, name="\udcff") == r"<p>\udcff</p>"
    chart = scores_chart([ScoreBar("\x1b[2J<b>", 1.0, 1.0, 0.1, 0.1, "—", True)], WIDE)
    assert "\x1b" not in chart
    assert r"\x1b[2J&lt;b&gt;" in chart


def test_tables_for_spreadsheets():
    rows = [["=1+1", -2.5, None], ["+a", 3, 1], ["-a", 0, 0], ["@a", 0, 0], ["\t=1", 0, 0], ['a,="b"', 0, 0]]
    text = csv_text(["name", "x", "y"], rows)
    assert text.splitlines()[1] == "'=1+1,-2.5,"
    read = [row[0] for row in csv.reader(text.splitlines())]
    assert read == ["name", "'=1+1", "'+a", "'-a", "'@a", r"\t=1", 'a,="b"']


def test_numbers_that_json_has_not():
    assert [finite(x) for x in (1.5, math.nan, math.inf, "a", 3)] == [1.5, None, None, "a", 3]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.3), (-7.3, 12.1), (1e-4, 3e-4), (-1e5, 1e6)])
def test_ticks_are_inside_and_about_as_many(low, high):
    ticks = Axis(low, high, 0, 100).ticks(6)
    assert 3 <= len(ticks) <= 8
    assert all(low - 1e-9 * abs(low) <= tick <= high * (1 + 1e-9) for tick in ticks)


def curve_of(*shares: float, band: float = 0.0) -> list[CurveMark]:
    return [
        CurveMark(0.1 * i, share, max(0.0, share - band), min(1.0, share + band), f"σ = {i}")
        for i, share in enumerate(shares)
    ]


@pytest.mark.parametrize(
    ("shares", "limits"),
    [
        ((0.9955, 0.994, 0.9575), (0.95, 1.0)),
        ((1.0, 0.998, 0.77), (0.75, 1.0)),
        ((1.0, 0.6, 0.1), (0.0, 1.0)),
        ((1.0, 1.0, 1.0), (0.99, 1.0)),
        ((0.62, 0.61, 0.5), (0.5, 0.625)),
        ((0.0, 0.0, 0.0), (0.0, 0.01)),
    ],
)
def test_the_scale_of_accuracy_shows_what_changes(shares, limits):
    low, high = share_limits(curve_of(*shares))
    assert (low, high) == pytest.approx(limits)
    assert low <= min(shares)
    assert max(shares) <= high


@pytest.mark.parametrize("width", WIDTHS)
def test_a_curve_has_its_points_where_they_belong(width):
    curve = curve_of(1.0, 0.5, 0.0, band=0.05)
    root = ElementTree.fromstring(accuracy_chart(curve, curve[1], "right <answers>", "noise", width))
    assert root.get("aria-label") == "right <answers> over noise"
    assert root.get("viewBox").split()[2] == str(width)
    line, band = (next(part for part in root.iter("path") if part.get("class") == name) for name in ("line", "band"))
    points = [tuple(map(float, point.split())) for point in line.get("d")[1:].split("L")]
    assert [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter("circle")] == points
    x, y = zip(*points, strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)  # rounded to a tenth of a pixel
    assert y[1] - y[0] == pytest.approx(y[2] - y[1], abs=0.2)
    assert y[2] > y[0]
    edge = [tuple(map(float, point.split())) for point in band.get("d")[1:-1].split("L")]
    assert len(edge) == 6
    assert edge[1][1] < y[1] < edge[4][1]
    assert "50.00% at σ = 1, between 45.00% and 55.00%" in [part.text for part in root.iter("title")]
    everything_is_inside(root, width)


def everything_is_inside(root: ElementTree.Element, width: int) -> None:
    """Of text, with 8 pixels a letter at most."""
    height = float(root.get("viewBox").split()[3])
    for part in root.iter("text"):
        x, letters = float(part.get("x")), 8 * len(part.text)
        start = x - {"end": letters, "middle": letters / 2}.get(part.get("text-anchor"), 0)
        assert start > -8, part.text
        assert start + letters < width + 24, part.text
        assert 0 < float(part.get("y")) < height
    for part in root.iter("circle"):
        assert 0 <= float(part.get("cx")) <= width
        assert 0 <= float(part.get("cy")) <= height


def mark(probability: float, high: float | None = None, wrong: bool = False) -> FlipMark:
    high = 1.2 * probability if high is None else high
    return FlipMark("<i>", probability, 0.8 * probability, min(1.0, high), "said", wrong)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_strip_has_a_mark_an_image(width):
    found = [mark(10.0**-k, wrong=k == 3) for k in range(16)] + [mark(0.1)] * 30
    bounded = [mark(0.0, 3 / 192)] * 100 + [mark(0.0, 3e-7, wrong=True)] * 3
    root = ElementTree.fromstring(flip_strip(found + bounded, width))
    dots = list(root.iter("circle"))
    assert len(dots) == 46
    assert len({(dot.get("cx"), dot.get("cy")) for dot in dots}) == 46
    assert sum("wrong" in dot.get("class") for dot in dots) == 1
    places = [float(dot.get("cx")) for dot in dots]
    assert places == sorted(places)
    open_marks = [part for part in root.iter("path") if part.get("class").startswith("below")]
    assert len(open_marks) == 103
    assert sum("wrong" in part.get("class") for part in open_marks) == 3
    edges = [float(part.get("x1")) for part in root.iter("line") if part.get("class") == "bound"]
    axis = Axis(-12, 0, 14, width - 14)
    assert edges == [axis.at(math.log10(3 / 192)), axis.at(math.log10(3e-7))]
    assert all(float(part.get("d")[1:].split()[0]) < edges[0] for part in open_marks)
    words = [part.text for part in root.iter("text")]
    assert "100 images: below 1.6%" in words
    assert "3 images: below 3e-7" in words
    assert "1 in a trillion" in words
    assert "<i>: said" in [part.text for part in root.iter("title")]
    everything_is_inside(root, width)


@pytest.mark.parametrize("marks", [[mark(0.0, 1.0)], [mark(0.3)], [mark(0.0, 1e-12), mark(1.0)], [mark(0.0, 0.0)]])
def test_strips_of_little(marks):
    for width in WIDTHS:
        everything_is_inside(ElementTree.fromstring(flip_strip(marks, width)), width)


def test_thousands_of_images_are_fewer_marks():
    assert images_a_mark(MOST_MARKS) == 1
    count = 10 * MOST_MARKS
    assert images_a_mark(count) == 10
    marks = [mark(0.2 + 0.5 * k / count) for k in range(count // 2)] + [mark(0.0, 0.01)] * (count // 2)
    root = ElementTree.fromstring(flip_strip(marks, WIDE))
    assert len(list(root.iter("circle"))) == MOST_MARKS / 2
    assert float(root.get("viewBox").split()[3]) < 700
    assert f"{count // 2:,} images: below 1%" in [part.text for part in root.iter("text")]


def test_bounds_alike_are_together():
    few = [mark(0.0, bound) for bound in (3 / 192, 3 / 191.9, 3e-6)]
    assert [len(group) for _, group in bound_groups(few)] == [2, 1]
    many = [mark(0.0, 0.1 / (k + 1)) for k in range(50)]
    groups = bound_groups([*many, mark(0.2)])
    assert [bound for bound, _ in groups] == [0.1, 0.01]
    assert sum(len(group) for _, group in groups) == 50
    assert bound_groups([mark(0.2)]) == []


def test_scores_of_classes_are_escaped_and_cut():
    long = "<b>" + 30 * "x"
    bars = [ScoreBar(long, 1.0, 0.1, 0.01, 0.002, "—", False), ScoreBar("b", 2.0, 0.0, 0.0, 0.0, "100%", True)]
    for width, letters in zip(WIDTHS, (19, 14), strict=True):
        root = ElementTree.fromstring(scores_chart(bars, width))
        names = [part for part in root.iter("text") if (part.get("class") or "").startswith("name")]
        assert [part.text for part in names] == [long[:letters] + "…", "—", "b", "100%"]
        assert ["answer" in part.get("class") for part in names] == [False, False, True, True]
        assert f"{long}: mean 1 ± 0.01, standard deviation 0.1 ± 0.002" in [part.text for part in root.iter("title")]
        everything_is_inside(root, width)


def test_a_chart_for_any_screen_is_there_twice():
    both = for_any_screen(partial(scores_chart, [ScoreBar("a", 1.0, 0.1, 0.0, 0.0, "100%", True)]), 600)
    widths = [svg.get("viewBox").split()[2] for svg in ElementTree.fromstring(f"<p>{both}</p>").iter("svg")]
    assert widths == ["600", str(NARROW)]

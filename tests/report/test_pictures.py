"""Charts as SVG and pictures as PNG."""

from __future__ import annotations

import base64
import io
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from netmoments.report import pictures
from netmoments.report.pictures import (
    Axis,
    PictureRow,
    a_sample,
    accuracy_chart,
    draw_rows,
    figure_png,
    png_data,
    require_matplotlib,
    scores_chart,
)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.3), (-7.3, 12.1), (1e-4, 3e-4), (-1e5, 1e6)])
def test_ticks_are_inside_and_about_as_many(low, high):
    ticks = Axis(low, high, 0, 100).ticks(6)
    assert 3 <= len(ticks) <= 8
    assert all(low - 1e-9 * abs(low) <= tick <= high * (1 + 1e-9) for tick in ticks)


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


def test_a_chart_has_its_points_where_they_belong():
    chart = accuracy_chart([(0.0, 1.0), (0.1, 0.5), (0.2, 0.0)], [], [(0.1, 0.5, 0.05)], 0.1, "right <answers>")
    root = ElementTree.fromstring(chart)
    assert root.get("aria-label") == "right <answers> over noise"
    (line,) = (part for part in root.iter("path") if part.get("class") == "line computed")
    points = [tuple(map(float, point.split())) for point in line.get("d")[1:].split("L")]
    (dot,) = root.iter("circle")
    assert (float(dot.get("cx")), float(dot.get("cy"))) == points[1]
    x, y = zip(*points, strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)  # rounded to a tenth of a pixel
    assert y[1] - y[0] == pytest.approx(y[2] - y[1], abs=0.2)
    assert y[2] > y[0]


def test_scores_of_classes_are_escaped_and_cut():
    long = "<b>" + 30 * "x"
    chart = scores_chart([long, "b"], "b", [1.0, 2.0], [0.1, 0.0], [[1.0, 2.1]], [(1.0, 0.1), (2.0, 0.2)])
    root = ElementTree.fromstring(chart)
    names = [part.text for part in root.iter("text") if (part.get("class") or "").startswith("name")]
    assert names == [long[:19] + "…", "b"]
    assert len(list(root.iter("circle"))) == 2 + 2  # a draw and a mean of each class


def test_pictures_of_an_attack(generator):
    mu = torch.randn(1, 5, 5, generator=generator)
    row = PictureRow(torch.rand(1, 5, 5, generator=generator), mu, torch.rand(1, 5, 5, generator=generator), "3", "8")
    panels = row.panels()
    assert all(float(panel.min()) >= 0 and float(panel.max()) <= 1 for panel in panels)
    torch.testing.assert_close(panels[2] - panels[3], mu / mu.abs().max())
    once, again = (figure_png(draw_rows([row, row])) for _ in range(2))
    assert once == again
    with Image.open(io.BytesIO(once)) as picture:
        assert picture.width > 800


def test_a_sample_is_seeded():
    centre = torch.full((2, 3), 0.5, dtype=torch.float64)
    assert torch.equal(a_sample(centre, 0.1, 3), a_sample(centre, 0.1, 3))
    assert not torch.equal(a_sample(centre, 0.1, 3), a_sample(centre, 0.1, 4))
    assert torch.equal(a_sample(centre, 0.0, 3), centre)


def test_missing_packages_are_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'pip install "netmoments\[report\]"'):
        png_data(torch.zeros(1, 2, 2))
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'figures need matplotlib: pip install "netmoments\[report\]"'):
        require_matplotlib()

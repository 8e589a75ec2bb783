"""Figures as files: rows of pictures of attacked images."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from netmoments.report import pictures
from netmoments.report.pictures import PictureRow, a_sample, draw_rows, figure_png, require_matplotlib


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
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'figures need matplotlib: pip install "netmoments\[report\]"'):
        require_matplotlib()

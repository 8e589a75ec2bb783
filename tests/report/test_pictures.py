"""Figures as files: rows of pictures of attacked images."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from netmoments.report.pictures import (
    PictureRow,
    draw_rows,
    drawable,
    drawn_noise,
    figure_png,
    over_the_image,
)


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


def test_drawn_noise_is_standard_normal_and_the_same_everywhere():
    """Moments within five standard errors; no two copies alike; and digits that no version may change."""
    noise = drawn_noise(3, 400, (1, 10, 10))
    count = noise.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((noise**power).mean()) - moment) < 5 * (variance / count) ** 0.5
    flat = noise.flatten(1)
    products = (flat @ flat.T / 100).fill_diagonal_(0)
    assert float(products.abs().max()) < 6 / 10  # of 80,000 pairs, in standard errors of 1/√100
    assert torch.equal(drawn_noise(3, 400, (100,)), flat)
    expected = torch.tensor(KNOWN, dtype=torch.float64)
    torch.testing.assert_close(drawn_noise(1, 2, (2,)).flatten(), expected, rtol=0, atol=1e-12)


KNOWN = [-0.90474405827513, 2.0200122988776, -0.17839387153899, 1.0466510784541]


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((1, 8, 8), True), ((3, 80, 80), True), ((3, 96, 96), False), ((1, 97, 2), False), ((64,), False)],
)
def test_which_images_a_page_can_draw(shape, fits):
    assert drawable(torch.zeros(shape)) is fits


def test_noise_over_an_image(generator):
    mu = torch.tensor([[[0.2, -0.2, 0.0]]])
    shown = over_the_image(torch.tensor([[[0.0, 1.0, 0.5]]]), mu)
    assert shown.shape == (3, 1, 3)
    assert shown[:, 0, 0].tolist() == pytest.approx([0xD5 / 255, 0x5E / 255, 0], abs=1e-6)  # brighter: orange
    assert shown[:, 0, 1].tolist() == pytest.approx([0, 0x72 / 255, 0xB2 / 255], abs=1e-6)  # darker: blue
    assert shown[:, 0, 2].tolist() == pytest.approx([0.55] * 3)  # grey
    nothing = over_the_image(torch.rand(3, 4, 5, generator=generator), torch.zeros(3, 4, 5))
    assert bool((nothing[0] == nothing[2]).all())

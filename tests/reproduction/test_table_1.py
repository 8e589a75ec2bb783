"""Table 1 at small sizes: the readings of the text, and how the error grows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import netmoments as nm
from reproduction import published, table_1
from reproduction.image_sweeps import StudiedImages
from reproduction.lenet_on_mnist import chosen_images
from reproduction.table_1 import LEVELS, LinearizationErrorSweep, Reading, differences
from tests.reproduction.small import drawn, settings_for, small_lenet


@pytest.fixture(scope="module")
def studied(few, tmp_path_factory) -> StudiedImages:
    numbers, images = chosen_images(settings_for(tmp_path_factory.mktemp("out"), images=7, data_dir=few))
    return StudiedImages(small_lenet(), images, numbers, 0)


def test_without_noise_there_is_no_difference(studied):
    columns = differences(studied.network, studied.images[:2], studied.numbers[:2], 0, levels=(0.0,))
    scale = float(studied.network(studied.images[:2]).detach().norm(dim=1).max())
    assert columns["logits"].max() < 1e-5 * scale
    assert columns["softmax"].max() < 1e-5


def test_results_do_not_depend_on_the_blocks(studied):
    whole = LinearizationErrorSweep("layers", studied, 7)
    parts = LinearizationErrorSweep("layers", studied, 3)
    assert list(parts.counts) == [3, 3, 1]
    assert whole.configuration != parts.configuration
    together = whole.prepare("cpu")(0)
    found = [parts.prepare("cpu")(item) for item in (2, 0, 1)]
    apart = {name: np.concatenate([columns[name] for columns in found]) for name in together}
    keys = ("level", "layer", "reading", "image")
    first, second = (np.lexsort([columns[key] for key in keys]) for columns in (together, apart))
    for key in keys:
        np.testing.assert_array_equal(together[key][first], apart[key][second])
    np.testing.assert_allclose(together["logits"][first], apart["logits"][second], atol=2e-4, rtol=1e-3)
    assert together["logits"].max() > 0.01
    assert len(together["image"]) == 7 * 4 * len(LEVELS) * 3


def test_the_table_of_a_reading():
    """Means and deviations over images are put where they belong."""
    columns = {
        name: np.array(value)
        for name, value in zip(
            ("reading", "layer", "level", "logits"),
            zip(
                *[(reading, layer, level, 1000 * reading + 100 * layer + level + image)
                  for image in (0, 2) for reading in range(4) for layer in (1, 2, 3) for level in LEVELS],
                strict=True,
            ),
            strict=True,
        )
    }  # fmt: skip
    table = table_1.table_of(columns, Reading("uniform", "clean"), "logits")
    assert table[3][1] == (2000 + 300 + 0.75 + 1, pytest.approx(2**0.5))
    assert table_1.growth({layer: [(3 * level**1.5, 0.0) for level in LEVELS] for layer in (1, 2, 3)}) == pytest.approx(
        1.5
    )
    halved = {layer: [(value / 2, 0.0) for value in published.TABLE_1[layer]] for layer in (1, 2, 3)}
    assert table_1.magnitude(halved) == pytest.approx(0.5)


def test_table_1_from_beginning_to_end(few, little_lenet, tmp_path):
    outcome = table_1.reproduce(settings_for(tmp_path, images=3, data_dir=few))
    assert len(outcome.comparisons) == 15
    assert all(0 < one.ours < 1 and one.paper is not None for one in outcome.comparisons)
    assert [len(panel.rows) for panel in outcome.panels] == [6, 9]
    assert all(len(row) == len(panel.columns) for panel in outcome.panels for row in panel.rows)
    json.dumps(outcome.numbers)
    assert drawn(outcome.drawings[0].draw(), tmp_path)


def test_the_error_grows_linearly_because_flat_pixels_tie_in_the_pools(data_dir, mnist, monkeypatch):
    """docs/experiments.md: on MNIST the error of Table 1 grows about linearly, on the same images with texture not."""
    main = Reading("gaussian", "clean")
    monkeypatch.setattr(table_1, "READINGS", (main,))
    images = nm.data.load("mnist", data_dir=data_dir).images[::1250]
    texture = 0.3 * torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    network = nm.zoo.pretrained("lenet")
    powers = []
    for shown in (images, (0.7 * images + texture).clamp(0, 1)):
        columns = differences(network, shown, torch.arange(len(shown)), seed=0)
        powers.append(table_1.growth(table_1.table_of(columns, main, "logits")))
    assert 0.9 < powers[0] < 1.1
    assert powers[1] > 1.3

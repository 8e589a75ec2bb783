"""Figures 1 and 2 and Table 1 of the paper at small sizes: items computed directly, drawings drawn."""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Generator, nn

import netmoments as nm
from netmoments.memory import gigabytes
from netmoments.network.relu_calls import Relu
from netmoments.paper import relu_cross_moment_series
from netmoments.sweep.local import LocalEngine
from reproduction import figure_1, figure_2, published, table_1
from reproduction.figure_1 import anatomy_of, input_shape, network_to_draw
from reproduction.figure_1_chart import Anatomy, draw_anatomy, shown_relus
from reproduction.grid_errors import (
    NODES,
    PAPER_CORRELATIONS,
    SEAM,
    TERMS,
    GridErrorSweep,
    cross_moment,
    every_correlation,
    grid,
    places,
    sampled_cross_moments,
)
from reproduction.images import chosen_images, chosen_network, digest_of
from reproduction.linearization_error import LEVELS, LinearizationErrorSweep, Reading, differences
from reproduction.over_images import Subjects
from reproduction.settings import Settings
from tests.closeness import assert_close
from tests.networks import FACTORIES, network

ROOT = Path(__file__).parent.parent


# the paper's numbers


def test_the_published_numbers_are_those_of_the_paper():
    path = ROOT.parent / "shared" / "paper" / "tables.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    tables = json.loads(path.read_text())
    assert list(published.TABLE_1_NOISE) == tables["table1"]["noise"]
    assert {str(layer): list(row) for layer, row in published.TABLE_1.items()} == tables["table1"]["layers"]
    two = {(row["sigma"], row["class"]): _row(row) for row in tables["table2"]}
    assert two == published.TABLE_2
    four = {(row["sigma"], row["k"], row["farthest_baseline"]): _row(row) for row in tables["table4"]}
    assert four == published.TABLE_4
    assert list(published.FIGURE_2_TERMS) == tables["figure2"]["terms"]
    assert abs(published.FIGURE_2_ERROR_20_TERMS - tables["figure2"]["max_abs_error_20_terms"]) < 1e-15


def _row(row: dict) -> tuple:
    return tuple(tuple(row[name]) for name in published.Published._fields)


# figure 2


def test_the_correlations_are_the_papers_and_more():
    rho = every_correlation()
    assert set(PAPER_CORRELATIONS) <= set(rho)
    assert {SEAM, -SEAM, -0.999} <= set(rho)
    assert list(rho) == sorted(set(rho))
    assert 70 <= len(rho) <= 100
    assert sum(abs(abs(x) - SEAM) < 0.04 for x in rho) >= 20


def test_sampled_cross_moments_are_within_five_standard_errors():
    """And every pair is where the grid has it: a transposition would be off by far more."""
    rho, samples = 0.6, 20_000
    sampled = sampled_cross_moments(rho, samples, Generator().manual_seed(7), "cpu")
    exact = cross_moment(*grid(rho))
    mu, sigma = places()
    chosen = torch.arange(0, 210, 13)
    z = torch.randn(2, 50_000, dtype=torch.float64, generator=Generator().manual_seed(8))
    other = rho * z[0] + math.sqrt(1 - rho**2) * z[1]
    first, second = (torch.relu(mu[chosen, None] + sigma[chosen, None] * x) for x in (z[0], other))
    spread = ((first**2) @ (second**2).T / z.shape[1] - (first @ second.T / z.shape[1]) ** 2).sqrt()
    error = (sampled - exact)[chosen][:, chosen].abs()
    assert bool((error <= 5 * spread / math.sqrt(samples) + 1e-3).all())
    assert float((exact - exact.T).abs().max()) < 1e-12  # swapping the variables changes nothing
    moved = sampled_cross_moments(-rho, samples, Generator().manual_seed(7), "cpu")
    assert float((moved - exact).abs().max()) > 1  # the correlation matters


def test_samples_come_in_chunks_of_any_number():
    generator = Generator().manual_seed(3)
    z = torch.cat([torch.randn(2, n, dtype=torch.float64, generator=generator) for n in (4096, 4096, 808)], 1)
    mu, sigma = (x[:, None] for x in places())
    other = 0.3 * z[0] + math.sqrt(1 - 0.3**2) * z[1]
    expected = torch.relu(mu + sigma * z[0]) @ torch.relu(mu + sigma * other).T / 9000
    assert_close(sampled_cross_moments(0.3, 9000, Generator().manual_seed(3), "cpu"), expected, atol=1e-12)


@pytest.fixture(scope="module")
def rows() -> dict[float, dict[str, float]]:
    sweep = GridErrorSweep(samples=2000, seed=1, correlations=(-0.7, 0.3, SEAM, 0.999))
    assert sweep.counts == (44_100,) * 4
    compute = sweep.prepare("cpu")
    found = {}
    for item, rho in enumerate(sweep.correlations):
        columns = compute(item)
        assert all(column.shape == (1,) for column in columns.values())
        found[rho] = {name: float(column[0]) for name, column in columns.items()}
    return found


def test_series_errors_are_those_of_the_design_guide(rows):
    """20 terms are 5.7e-3 off at |ρ| = 0.7, 5 terms 4e-2; and equal another evaluation at every ninth place."""
    assert rows[-0.7]["series_20"] == pytest.approx(5.7e-3, rel=0.02)
    assert rows[-0.7]["series_5"] == pytest.approx(4.15e-2, rel=0.02)
    assert rows[SEAM]["series_50"] > 1e-3
    place = tuple(x.flatten()[::9] for x in grid(-0.7))
    for terms in TERMS:
        error = float((relu_cross_moment_series(*place, terms=terms) - cross_moment(*place)).abs().max())
        assert 0.7 * rows[-0.7][f"series_{terms}"] < error <= rows[-0.7][f"series_{terms}"] * (1 + 1e-9)


def test_the_worst_point_of_a_truncation_is_found(rows):
    place = grid(0.3)
    error = (relu_cross_moment_series(*place, terms=1) - cross_moment(*place)).abs()
    assert rows[0.3]["series_1"] == float(error.max())


def test_more_nodes_are_better_down_to_rounding(rows):
    for row in rows.values():
        errors = [row[f"nodes_{count}"] for count in NODES]
        for fewer, more in itertools.pairwise(errors):
            assert more < 0.5 * fewer or more < 1e-15
        assert row["kernel"] < 2e-15
    assert rows[0.999]["nodes_8"] > 1e-7  # where the kernel needs more of them
    assert rows[-0.7]["nodes_8"] < 1e-12


def test_sampling_at_the_papers_correlations_only(rows):
    assert math.isnan(rows[SEAM]["monte_carlo"])
    assert math.isnan(rows[SEAM]["sampled_5"])
    floor = rows[0.3]["monte_carlo"]
    assert 1e-2 < floor < 1
    assert rows[0.3]["sampled_50"] == pytest.approx(floor, rel=1e-9)  # the series is exact there
    assert abs(rows[-0.7]["sampled_1"] - rows[-0.7]["series_1"]) <= rows[-0.7]["monte_carlo"] * (1 + 1e-9)


# the images


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """A stand-in for MNIST's test set: 30 images with a black background."""
    folder = tmp_path_factory.mktemp("mnist")
    pixels = np.random.default_rng(5).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    pixels[:, :8], pixels[:, 20:], pixels[:, :, :8], pixels[:, :, 20:] = 0, 0, 0, 0
    header = struct.pack(">4B3I", 0, 0, 8, 3, *pixels.shape)
    (folder / "t10k-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
    labels = struct.pack(">4BI", 0, 0, 8, 1, 30) + bytes(range(10)) * 3
    (folder / "t10k-labels-idx1-ubyte").write_bytes(labels)
    return folder


def settings_for(out: Path, **changes) -> Settings:
    return Settings(out=out, engine=LocalEngine(["cpu"]), device=torch.device("cpu"), **changes)


def test_images_are_evenly_spread(few, tmp_path):
    indices, images = chosen_images(settings_for(tmp_path, images=4, data_dir=few))
    assert indices.tolist() == [0, 7, 15, 22]
    everything = chosen_images(settings_for(tmp_path, images=30, data_dir=few))[1]
    assert torch.equal(images, everything[indices])
    for count in (1, 31):
        with pytest.raises(ValueError, match=f"from 2 to 30, which is what MNIST's test set has here, got {count}"):
            chosen_images(settings_for(tmp_path, images=count, data_dir=few))


def test_a_digest_knows_values_shapes_and_order():
    x, y = torch.arange(6.0), torch.ones(2)
    digests = {digest_of(x, y), digest_of(y, x), digest_of(x.reshape(2, 3), y), digest_of(x + 1e-6, y), digest_of(x)}
    assert len(digests) == 5
    assert digest_of(x, y) == digest_of(x.clone(), y.clone())
    assert len(digest_of(x)) == 16


# table 1


@pytest.fixture(scope="module")
def subjects(few, tmp_path_factory) -> Subjects:
    settings = settings_for(tmp_path_factory.mktemp("out"), images=7, data_dir=few)
    numbers, images = chosen_images(settings)
    return Subjects(chosen_network(settings), images, numbers, settings.seed)


def test_without_noise_there_is_no_difference(subjects):
    columns = differences(subjects.network, subjects.images[:2], subjects.numbers[:2], 0, levels=(0.0,))
    scale = float(subjects.network(subjects.images[:2]).detach().norm(dim=1).max())
    assert columns["logits"].max() < 1e-5 * scale
    assert columns["softmax"].max() < 1e-5


def test_results_do_not_depend_on_the_blocks(subjects):
    whole = LinearizationErrorSweep("layers", subjects, 7)
    parts = LinearizationErrorSweep("layers", subjects, 3)
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


def test_table_1_from_beginning_to_end(few, tmp_path):
    outcome = table_1.reproduce(settings_for(tmp_path, images=3, data_dir=few))
    assert len(outcome.comparisons) == 15
    assert all(0 < one.ours < 1 and one.paper is not None for one in outcome.comparisons)
    assert [len(panel.rows) for panel in outcome.panels] == [6, 9]
    assert all(len(row) == len(panel.columns) for panel in outcome.panels for row in panel.rows)
    json.dumps(outcome.numbers)
    assert drawn(outcome.drawings[0].draw(), tmp_path)


def drawn(figure, folder: Path) -> bool:
    figure.savefig(folder / "figure.svg")
    return (folder / "figure.svg").stat().st_size > 5000


# figure 2 and figure 1 from beginning to end


def test_figure_2_from_beginning_to_end(tmp_path, monkeypatch):
    fewer = functools.partial(GridErrorSweep, correlations=(*PAPER_CORRELATIONS, 0.99))
    monkeypatch.setattr(figure_2, "GridErrorSweep", fewer)
    outcome = figure_2.reproduce(settings_for(tmp_path, samples=1000))
    ours = {one.what: one.ours for one in outcome.comparisons}
    assert ours["largest error, 20 terms, against exact"] == pytest.approx(5.7e-3, rel=0.02)
    assert ours["largest error, 20 terms, against 1,000 samples"] > 1e-2
    assert outcome.comparisons[0].paper == published.FIGURE_2_ERROR_20_TERMS
    assert all(len(row) == len(panel.columns) for panel in outcome.panels for row in panel.rows)
    assert "nan" not in str(outcome.panels).lower()
    json.dumps(outcome.numbers, allow_nan=False)
    assert drawn(outcome.drawings[0].draw(), tmp_path)


@pytest.mark.parametrize(("count", "kept", "before", "after"), [
    (3, 2, [0, 1], []),
    (5, 0, [], [1, 2, 3, 4]),
    (26, 25, [0, None, 24], []),
    (26, 0, [], [1, None, 25]),
    (26, 1, [0], [2, None]),
    (26, 12, [None, 11], [13, None]),
    (26, 24, [None, 23], [25]),
])  # fmt: skip
def test_the_middle_of_long_networks_is_left_out(count, kept, before, after):
    assert shown_relus(count, kept) == (before, after)


@pytest.mark.parametrize("name", ["lenet", "residual", "concatenation", "shared", "folded"])
def test_figure_1_draws_any_network(name, tmp_path):
    net = network(name)
    for layer in (0, -1):
        anatomy = anatomy_of(name, net, FACTORIES[name][1], layer)
        figure = draw_anatomy(anatomy)
        said = {text.get_text() for axes in figure.axes for text in axes.texts}
        kept = anatomy.relus[layer]
        assert f"q = {kept.size:,}" in said
        assert f"n = {math.prod(FACTORIES[name][1])}" in said
        assert any("paths around" in text for text in said) == anatomy.around
        assert drawn(figure, tmp_path)
    assert anatomy_of(name, net, FACTORIES[name][1], 0).around == (name == "concatenation")


def test_a_path_around_the_kept_relu_is_seen():
    net = network("residual")
    around = [anatomy_of("residual", net, (2, 6, 6), layer).around for layer in range(5)]
    assert around == [False, True, False, True, False]


def squeezenet() -> Anatomy:
    """SqueezeNet by its names and its longest numbers."""
    fires = [f"1.fire{i}.{part}_relu" for i in range(2, 10) for part in ("squeeze", "expand")]
    relus = [Relu(i, name, torch.Size([384, 111, 111])) for i, name in enumerate(["1.relu1", *fires, "1.relu10"])]
    return Anatomy("squeezenet", tuple(relus), 10, (3, 227, 227), 1000, True)


@pytest.mark.parametrize("model", ["lenet", "faces", "squeezenet"])
def test_texts_of_figure_1_stay_in_their_boxes(model):
    """No text is wider than the smallest box around its middle, and none meets another."""
    if model == "squeezenet":
        anatomy = squeezenet()
    else:
        net = network_to_draw(model, None)
        anatomy = anatomy_of(model, net, input_shape(model, net), -1)
    figure = draw_anatomy(anatomy)
    figure.canvas.draw()
    (axes,) = figure.axes
    texts = [(text.get_text(), text.get_window_extent()) for text in axes.texts]
    boxes = [patch.get_window_extent() for patch in axes.patches if type(patch).__name__ == "FancyBboxPatch"]
    for said, extent in texts:
        x, y = (extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2
        around = [box for box in boxes if box.x0 <= x <= box.x1 and box.y0 <= y <= box.y1]
        if around:
            smallest = min(around, key=lambda box: box.width)
            assert smallest.x0 <= extent.x0, said
            assert extent.x1 <= smallest.x1, said
    for i, (said, extent) in enumerate(texts):
        for other_said, other in texts[:i]:
            apart = (
                extent.x1 <= other.x0 or other.x1 <= extent.x0 or extent.y1 <= other.y0 + 2 or other.y1 <= extent.y0 + 2
            )
            assert apart, f"{said} meets {other_said}"


def test_figure_1_from_beginning_to_end(tmp_path):
    outcome = figure_1.reproduce(settings_for(tmp_path))
    (panel,) = outcome.panels
    assert [row[3] for row in panel.rows] == ["6,272", "3,136", "1,024"]
    assert panel.rows[2][4:] == (f"{1024 * 794:,}", gigabytes(4 * 1024 * 794))
    assert outcome.numbers["kept"] == "relu3"
    json.dumps(outcome.numbers)
    assert drawn(outcome.drawings[0].draw(), tmp_path)
    by_name = figure_1.reproduce(settings_for(tmp_path, model="digits", layer="relu1"))
    assert by_name.numbers["inputs"] == 64


def test_figure_1_of_a_network_of_the_users(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))\n"
    )
    with pytest.raises(ValueError, match=r"given an image of MNIST's shape, \(1, 28, 28\).*\.pt2"):
        figure_1.reproduce(settings_for(tmp_path, model=f"{path}:make"))
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    torch.export.save(torch.export.export(net, (torch.zeros(1, 5),)), tmp_path / "mine.pt2")
    outcome = figure_1.reproduce(settings_for(tmp_path, model=str(tmp_path / "mine.pt2")))
    assert (outcome.numbers["inputs"], outcome.numbers["outputs"], outcome.numbers["model"]) == (5, 2, "mine")


def test_the_error_grows_linearly_because_flat_pixels_tie_in_the_pools(data_dir, mnist):
    """docs/experiments.md: on MNIST the error of Table 1 grows about linearly, on the same images with texture not."""
    images = nm.data.load("mnist", data_dir=data_dir).images[::1000]
    texture = 0.3 * torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    network = nm.zoo.pretrained("lenet")
    powers = []
    for shown in (images, (0.7 * images + texture).clamp(0, 1)):
        columns = differences(network, shown, torch.arange(len(shown)), seed=0)
        powers.append(table_1.growth(table_1.table_of(columns, Reading("gaussian", "clean"), "logits")))
    assert 0.9 < powers[0] < 1.1
    assert powers[1] > 1.3

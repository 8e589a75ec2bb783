"""The frontier: every method timed and measured on the same images, resumed, averaged and drawn."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from netmoments.report.pictures import figure_png
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.run import run_sweep
from reproduction import frontier, frontier_sweep
from reproduction.experiment import Origin, Settings, Unfinished, Until
from reproduction.frontier import draw_frontiers
from reproduction.frontier_sweep import SIGMA, Case, Frontier, FrontierSweep, Point, Size, Way, frontiers, ways
from reproduction.image_sweeps import StudiedImages
from reproduction.writing import as_json, summary_of

SIZE = Size(2, 2_000, probes=(4, 8), assisted=(100,))


def studied(seed: int, images: int = 2) -> StudiedImages:
    """A small convolutional network on small random images."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 12), nn.ReLU(),
        nn.Linear(12, 6),
    )  # fmt: skip
    pictures = torch.rand(images, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
    return StudiedImages(network.eval(), pictures, torch.arange(images) * 7, seed=1)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [
        Case("first", studied(0), SIZE, random=True),
        Case("second", studied(1, 1), replace(SIZE, left_out=("unscented",)), random=False, largest=3),
    ]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    return Settings(tmp_path_factory.mktemp("frontier"), LocalEngine(["cpu"]), torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def timed_once():
    """The median of several calls is for times, which no test is about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier_sweep, "REPEATS", 1)
        yield


@pytest.fixture(scope="module")
def columns(cases, settings) -> dict[str, np.ndarray]:
    """The rows of the sweep, under the name that the experiment gives it."""
    return settings.run(FrontierSweep(frontier_sweep.NAME, cases)).columns


@pytest.fixture(scope="module")
def found(cases, columns) -> list[Frontier]:
    return frontiers(cases, columns)


class TestSweep:
    def test_plain_sampling_goes_up_to_a_tenth_of_the_reference(self, cases):
        assert [way.size for way in ways(cases[0]) if way.method == "sampling"] == [100]
        large = replace(cases[0], size=replace(SIZE, reference=1_000_000))
        assert [way.size for way in ways(large) if way.method == "sampling"] == [10**k for k in (2, 3, 4, 5)]

    def test_every_way_has_a_row_for_every_score(self, cases, columns):
        for case, scores in zip(cases, (6, 3), strict=True):
            mine = columns["network"] == case.name
            images = len(case.studied.images)
            assert mine.sum() == len(ways(case)) * images * scores
        left_out = columns["status"] == frontier_sweep.TOO_LONG
        assert set(columns["method"][left_out]) == {"unscented"}
        assert np.isnan(columns["variance"][left_out]).all()
        done = columns["status"] == ""
        assert np.isfinite(columns["variance"][done]).all()
        assert (columns["seconds"][done] > 0).all()

    def test_it_goes_on_where_it_was_stopped(self, cases, columns, tmp_path):
        sweep = FrontierSweep("frontier", cases)
        with pytest.raises(Unfinished, match="1 of 3 images done"):
            run_sweep(sweep, tmp_path, Until(LocalEngine(["cpu"]), 0.0))
        whole = run_sweep(sweep, tmp_path, LocalEngine(["cpu"])).columns
        for name in set(columns) - {"item", "seconds", "sample_seconds"}:
            np.testing.assert_array_equal(whole[name], columns[name], err_msg=name)

    def test_what_does_not_fit_says_so(self, cases, monkeypatch):
        monkeypatch.setattr(frontier_sweep, "memory_limit", lambda device, budget: 1)
        columns = FrontierSweep("frontier", cases[1:]).prepare("cpu")(0)
        assert set(columns["status"][columns["method"] == "layerwise"]) == {frontier_sweep.NO_ROOM}

    def test_another_size_is_another_configuration(self, cases):
        other = [replace(cases[0], size=replace(SIZE, reference=4_000)), cases[1]]
        assert FrontierSweep("frontier", cases).configuration != FrontierSweep("frontier", other).configuration


GALLERY = """
import torch
from torch import nn

def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 12)).eval()

def smooth():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Tanh(), nn.Linear(8, 4)).eval()

NETWORKS = {"dense": dense, "smooth": smooth}

def load(name):
    return NETWORKS[name]()

def images_for(name, images):
    return images
"""


class TestGallery:
    @pytest.fixture
    def told(self, settings, few, tmp_path, monkeypatch) -> Settings:
        (tmp_path / "networks.py").write_text(GALLERY)
        monkeypatch.setattr(frontier_sweep, "MADE", ())
        monkeypatch.setattr(frontier_sweep, "LEVELS", {"cpu": (0.05, 0.3)})
        monkeypatch.setattr(frontier_sweep, "GALLERY", {"cpu": SIZE})
        return replace(settings, gallery=tmp_path, data_dir=few, out=tmp_path / "out")

    def test_its_networks_are_measured_at_every_level(self, told):
        made = frontier_sweep.cases(told)
        assert [case.name for case in made] == ["dense", "smooth", "dense, σ = 0.3", "smooth, σ = 0.3"]
        assert [len(case.outputs(0)) for case in made[:2]] == [10, 4]
        columns = told.run(FrontierSweep("frontier", made)).columns
        refused = columns["status"] == frontier_sweep.REFUSED
        assert set(zip(columns["network"][refused], columns["method"][refused], strict=True)) == {
            ("smooth", "two-stage"), ("smooth, σ = 0.3", "two-stage"),
        }  # fmt: skip
        assert np.isfinite(columns["variance"][~refused]).all()

    def test_a_folder_without_networks_is_named(self, told, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no gallery: a folder with networks\.py"):
            frontier_sweep.cases(replace(told, gallery=tmp_path / "out"))


class TestErrors:
    def test_the_floor_is_half_of_what_the_halves_are_apart(self, columns, found):
        one = (columns["network"] == "first") & (columns["method"] == "linear")
        first, second = columns["first_variance"][one], columns["second_variance"][one]
        apart = 2 * np.abs(first - second) / (np.abs(first) + np.abs(second))
        assert found[0].variance_floor == pytest.approx(apart.mean() / 2)
        # two halves of N/2 samples: a relative error of √(2/N) each time √(2/π) for its mean size, to a factor of two
        assert 0.5 < found[0].variance_floor / ((2 / 2_000) ** 0.5 * (2 / np.pi) ** 0.5) < 2

    def test_layerwise_is_closer_than_a_hundred_samples(self, found):
        errors = {point.way: point.variance_error for point in found[0].points}
        assert errors[Way("layerwise")] < errors[Way("sampling", 100)]

    def test_as_good_samples_follow_the_law_of_sampling(self, cases):
        plain = Point(Way("sampling", 100), "", 0.1, 0.2, 0.1, 1.0)
        better = Point(Way("layerwise"), "", 0.1, 0.02, 0.5, 1.0)
        slower = Point(Way("sketch", 64), "", 0.1, 0.05, 0.7, 1.0)
        floor = 0.2 * (100 / SIZE.reference) ** 0.5
        one = Frontier(cases[0], (better, slower, plain), floor, floor, 0.001)
        assert one.as_good_samples(better) == pytest.approx(100 * 10**2)
        assert one.gain(better) == pytest.approx(10_000 * 0.001 / 0.5)
        assert one.best() == [better]


class TestOutcome:
    def test_everything_is_shown(self, cases, settings, found, monkeypatch):
        monkeypatch.setattr(frontier, "cases", lambda settings: cases)
        outcome = frontier.reproduce(settings)
        assert [len(panel.rows) for panel in outcome.panels] == [len(ways(case)) for case in cases]
        cells = " ".join(cell for panel in outcome.panels for row in panel.rows for cell in row)
        assert "nan" not in cells
        assert "left out" in cells
        assert outcome.numbers["networks"][1]["methods"][3] == {
            "method": "unscented", "size": 0, "status": "left out",
        }  # fmt: skip
        assert as_json(summary_of(outcome, Origin.of_this_run(torch.device("cpu"), 0)))
        assert "One image" in outcome.reading[-1]

    def test_many_networks_and_levels_are_a_line_each(self, cases, settings, tmp_path, monkeypatch):
        few = [cases[0], cases[0].at(0.2), replace(cases[1], in_full=False)]
        assert [len(case.studied.images) for case in few] == [2, 1, 1]
        monkeypatch.setattr(frontier, "cases", lambda settings: few)
        outcome = frontier.reproduce(replace(settings, out=tmp_path))
        assert len(outcome.panels) == 2
        assert [row[:2] for row in outcome.panels[1].rows] == [("first", "0.05"), ("first", "0.2"), ("second", "0.05")]
        assert outcome.panels[1].breaks == (2,)
        assert [(one["network"], one["sigma"]) for one in outcome.numbers["networks"]] == [
            ("first", 0.05), ("first", 0.2), ("second", 0.05),
        ]  # fmt: skip
        assert len(pickle.loads(pickle.dumps(outcome.drawings[0])).draw().axes) == 1  # on another machine

    def test_it_is_drawn(self, found):
        figure = draw_frontiers(found)
        assert [axes.get_title(loc="left") for axes in figure.axes] == ["first", "second"]
        assert figure_png(figure).startswith(b"\x89PNG")

    def test_noise_has_the_level_that_is_said(self, cases):
        for case in cases:
            assert float(case.noise(0).covariance.variances().mean()) == pytest.approx(SIGMA**2, rel=1e-5)

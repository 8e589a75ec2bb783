"""Table 2's other methods, on a small network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import netmoments as nm
from netmoments.covariances import LowRank
from netmoments.gaussian import Gaussian
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.run import run_sweep
from reproduction import every_method, lenet_on_mnist, table_2
from reproduction.every_method import METHODS, MOMENTS, EveryMethod, EveryMethodSweep, draw_methods
from reproduction.experiment import Settings, Unfinished, Until
from reproduction.image_sweeps import SIGMAS, StudiedImages, cube
from reproduction.lenet_on_mnist import Errors, pooled
from tests.closeness import assert_close
from tests.reproduction.small import small_images


@pytest.fixture(scope="module")
def three() -> StudiedImages:
    return small_images(3)


@pytest.fixture(scope="module")
def sweep(three) -> EveryMethodSweep:
    return EveryMethodSweep("tighter", three, 1, reference=8_000, plain=400, assisted=100, probes=32)


@pytest.fixture(scope="module")
def run(sweep, tmp_path_factory) -> tuple[Settings, EveryMethod]:
    settings = Settings(tmp_path_factory.mktemp("tighter"), LocalEngine(["cpu"]), torch.device("cpu"))
    return settings, every_method.errors_of_methods(settings, sweep)


class TestEveryMethod:
    """Table 2's other methods, on the small network."""

    def test_rows_have_every_method_and_the_halves(self, sweep, three):
        columns = sweep.prepare("cpu")(1)
        for name in (*METHODS, "reference", "first", "second"):
            for moment in MOMENTS:
                assert np.isfinite(columns[f"{name}_{moment}"]).all(), name
        assert set(columns["image"]) == {int(three.numbers[1])}
        noise = Gaussian(three.images[1:2], LowRank(SIGMAS[3] * three.factor(1)[None]))
        for method, column in (("layerwise", "layerwise"), ("linear", "delta"), ("two-stage", "two_stage")):
            expected = nm.output_moments(three.network, noise, method).variance[0].double()
            value = torch.from_numpy(cube(columns, f"{column}_variance", three.numbers)[1, 3])
            assert_close(value, expected, rtol=1e-4)

    def test_it_goes_on_where_it_was_stopped(self, sweep, tmp_path):
        sweep = replace(sweep, reference=400)
        with pytest.raises(Unfinished, match="1 of 3 images done"):
            run_sweep(sweep, tmp_path, Until(LocalEngine(["cpu"]), 0.0))
        whole = run_sweep(sweep, tmp_path, LocalEngine(["cpu"])).columns
        last = sweep.prepare("cpu")(2)
        for name, values in last.items():
            np.testing.assert_array_equal(whole[name][-len(values) :], values, err_msg=name)

    def test_two_halves_are_pooled_as_one_run(self):
        x = torch.randn(2, 50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
        halves = [(half.mean(0), half.var(0)) for half in x]
        mean, variance = pooled(*halves, 50)
        assert_close(mean, x.reshape(100, 3).mean(0), rtol=1e-12)
        assert_close(variance, x.reshape(100, 3).var(0), rtol=1e-12)

    def test_the_floor_is_half_of_what_the_halves_are_apart(self, run):
        _, found = run
        apart = found.halves["variance"].average(2)
        assert found.floor("variance", 2) == pytest.approx(apart / 2)
        # N plain samples of a nearly Gaussian score: √(2/N) times √(2/π); assisted ones are better
        assert 0 < found.floor("variance", 2) < (2 / 8_000) ** 0.5 * (2 / np.pi) ** 0.5
        assert found.errors["variance"]["plain"].average(2) > 2 * found.floor("variance", 2)

    def test_panels_numbers_and_drawing(self, run):
        _, found = run
        for panel in every_method.panels(found):
            assert len(panel.columns) == 1 + len(METHODS) + 1
            assert [row[0] for row in panel.rows] == [f"{sigma}" for sigma in SIGMAS]
            assert "nan" not in " ".join(cell for row in panel.rows for cell in row)
        level = every_method.numbers(found)["levels"][3]
        assert level["variance"]["layerwise"]["average"] < level["variance"]["two_stage"]["average"]
        assert len(every_method.reading(found)) == 2
        assert draw_methods(found).axes

    def test_one_image_has_no_spread(self, run):
        _, found = run
        one = Errors(found.halves["mean"].each[:1], found.halves["mean"].finite[:1])
        errors = {moment: dict.fromkeys(METHODS, one) for moment in MOMENTS}
        alone = EveryMethod(errors, dict.fromkeys(MOMENTS, one), 100, 1.0)
        assert every_method.numbers(alone)["levels"][0]["mean"]["plain"]["standard_error"] is None

    def test_a_cpu_takes_few_images(self, three, run):
        settings, _ = run
        assert every_method.sweep_of(settings, three) is None
        assert "--images 50" in every_method.reading(None)[0]
        many = replace(three, images=three.images.repeat(35, 1, 1, 1), numbers=torch.arange(105))
        assert len(every_method.sweep_of(settings, many).studied.images) == 2

    def test_table_2_shows_them(self, three, sweep, run, monkeypatch):
        settings, _ = run
        monkeypatch.setattr(lenet_on_mnist, "shared_images", lambda settings: three)
        monkeypatch.setattr(every_method, "sweep_of", lambda settings, on: sweep)
        monkeypatch.setattr(table_2, "_by_logit", lambda errors, floor: table_2.mean_panel(errors, floor))
        outcome = table_2.reproduce(replace(settings, samples=50))
        assert [panel.title for panel in outcome.panels[2:]] == [
            "Every method: error of the mean", "Every method: error of the variance",
        ]  # fmt: skip
        assert [drawing.name for drawing in outcome.drawings] == ["table-2", "table-2-methods"]
        assert outcome.numbers["tighter"]["images"] == 3

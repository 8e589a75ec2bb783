"""What Tables 2, 3 and 4 share: random noise, sampled and computed moments, and how errors are averaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import netmoments as nm
from netmoments.covariances import LowRank
from netmoments.gaussian import Gaussian
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine
from netmoments.sweep.run import run_sweep
from reproduction.experiment import Machine, Origin, Settings, Unfinished, machine_here, machines
from reproduction.image_sweeps import (
    SIGMAS,
    StudiedImages,
    blocks,
    cube,
    digest_of,
    orthogonalized,
    random_covariance,
    rows,
)
from reproduction.lenet_on_mnist import (
    Errors,
    MonteCarloSweep,
    TightnessSweep,
    chosen_images,
    delta_method,
    moments_at,
    sampled_moments,
)
from tests.closeness import assert_close
from tests.reproduction.small import settings_for, small_images


@pytest.fixture(scope="module")
def studied() -> StudiedImages:
    return small_images()


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


class TestRandomCovariance:
    def test_it_has_the_trace_and_eigenvalues_of_the_paper(self):
        sigma = 0.05
        covariance = random_covariance(200, sigma, torch.Generator().manual_seed(0))
        assert_close(covariance.trace(), torch.tensor(sigma**2 * 200, dtype=torch.float64), rtol=1e-12)
        values = torch.linalg.eigvalsh(covariance)
        assert float(values.min()) > 0
        # uniform on (0, 1] but for the scale: the largest of 200 is close to twice the mean
        assert 1.8 < float(values.max()) / sigma**2 < 2.2

    def test_a_factor_is_orthogonal_to_rounding(self):
        q = orthogonalized(torch.randn(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
        assert_close(q.T @ q, torch.eye(300, dtype=torch.float64), rtol=0, atol=1e-13)

    def test_it_is_householders_q_with_a_positive_diagonal(self):
        matrix = torch.randn(40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        q, r = torch.linalg.qr(matrix)
        assert_close(orthogonalized(matrix), q * torch.sign(r.diagonal()), rtol=0, atol=1e-11)

    def test_a_singular_matrix_falls_back_to_householder(self):
        matrix = torch.randn(30, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        matrix[:, 1] = matrix[:, 0]
        q = orthogonalized(matrix)
        assert_close(q.T @ q, torch.eye(30, dtype=torch.float64), rtol=0, atol=1e-12)


class TestSampled:
    def test_moments_agree_with_the_librarys_sampling(self, studied):
        factor = studied.factor(2)
        mean, variance = sampled_moments(
            studied.network, studied.images[2], factor, 20_000, studied.generator("here", 2)
        )
        for level, sigma in enumerate(SIGMAS):
            noise = Gaussian(studied.images[2], LowRank(sigma * factor))
            other = nm.monte_carlo(studied.network, noise, 20_000, seed=5)
            two = 2**0.5
            assert ((mean[level] - other.mean).abs() < 5 * two * other.mean_standard_error).all()
            assert ((variance[level] - other.variance).abs() < 5 * two * other.variance_standard_error).all()

    def test_results_do_not_depend_on_the_blocks(self, studied):
        def columns(block):
            sweep = MonteCarloSweep("monte-carlo", studied, block, samples=50)
            work = sweep.prepare("cpu")
            parts = [work(item) for item in range(len(sweep.counts))]
            return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

        one, three = columns(1), columns(3)
        for name in one:
            np.testing.assert_array_equal(one[name], three[name])

    def test_another_name_is_an_independent_run(self, studied):
        first, again = (MonteCarloSweep(name, studied, 8, samples=50).prepare("cpu")(0) for name in ("one", "two"))
        assert not np.array_equal(first["mean"], again["mean"])

    def test_each_image_has_a_covariance_of_its_own_that_follows_its_number(self, studied):
        assert not torch.equal(studied.factor(0), studied.factor(1))
        turned = replace(studied, numbers=studied.numbers.flip(0))
        assert torch.equal(studied.factor(0), turned.factor(7))


class TestComputed:
    def test_moments_are_those_of_the_front_door(self, studied):
        images = studied.images[:3]
        factors = torch.stack([studied.factor(place) for place in range(3)])
        network = nm.two_stage(studied.network, images)
        found = moments_at(network, images, factors) | delta_method(network, images, factors)
        for level, sigma in enumerate(SIGMAS):
            covariance = sigma**2 * (factors @ factors.mT)
            noise = Gaussian(images, 0.5 * (covariance + covariance.mT))
            two_stage = nm.output_moments(studied.network, noise, "two-stage")
            linear = nm.output_moments(studied.network, noise, "linear")
            assert_close(found["mean"][:, level], two_stage.mean, rtol=1e-4, atol=1e-6)
            assert_close(found["variance"][:, level], two_stage.variance, rtol=1e-4)
            assert_close(found["delta_mean"][:, level], linear.mean, rtol=1e-4, atol=1e-6)
            assert_close(found["delta_variance"][:, level], linear.variance, rtol=1e-4)
            unscaled = nm.paper.variance_zero_mean(network, noise)
            assert_close(found["theorem_2"][:, level], unscaled, rtol=1e-3)
            assert_close(found["authors_old"][:, level], nm.paper.variance_zero_mean_pairs(network, noise), rtol=1e-3)

    def test_the_series_is_close_at_large_noise_and_rounds_at_small(self, studied):
        images = studied.images[:2]
        factors = torch.stack([studied.factor(place) for place in range(2)])
        found = moments_at(nm.two_stage(studied.network, images), images, factors)
        error = nm.relative_difference(found["series"], found["variance"]).amax((0, 2))
        assert float(error[-1]) < 0.02
        assert float(error[0]) > float(error[-1])

    def test_blocks_do_not_matter_but_for_rounding(self, studied):
        one, whole = TightnessSweep("tightness", studied, 1), TightnessSweep("tightness", studied, 8)
        apart = [one.prepare("cpu")(item) for item in range(8)]
        together = whole.prepare("cpu")(0)
        for name in ("mean", "variance", "authors_old", "delta_variance"):
            joined = np.concatenate([part[name] for part in apart])
            np.testing.assert_allclose(joined, together[name], rtol=2e-4, atol=1e-6)

    def test_the_configuration_tells_networks_and_images_apart(self, studied):
        here = TightnessSweep("tightness", studied, 1).configuration
        other = replace(studied, images=studied.images.flip(0))
        assert here != TightnessSweep("tightness", other, 1).configuration
        assert here == TightnessSweep("tightness", studied, 1).configuration


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda on: MonteCarloSweep("monte-carlo", on, 2, samples=400), lambda on: TightnessSweep("t", on, 2)]
)
def test_a_ray_cluster_gives_the_same_bits(studied, tmp_path, two_workers, make):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = run_sweep(make(studied), tmp_path / "here", LocalEngine(["cpu"]))
    finally:
        torch.set_num_threads(threads)
    there = run_sweep(make(studied), tmp_path / "there", RayEngine("cpu", threads=1))
    for name, values in here.columns.items():
        np.testing.assert_array_equal(values, there.columns[name], err_msg=name)


class TestErrors:
    def test_averages_are_those_of_the_papers_rows(self):
        sampled = np.ones((3, 1, 2))
        computed = np.array([[[1.0, 3.0]], [[1.0, 1.0]], [[3.0, 1.0]]])  # 2·2/4 = 1 where it is 3
        errors = Errors.between(computed, sampled)
        assert errors.mean(0, 0) == pytest.approx(1 / 3)
        assert errors.spread(0, 0) == pytest.approx(3**-0.5)
        assert errors.average(0) == pytest.approx(1 / 3)
        assert errors.average_spread(0) == pytest.approx(3**-0.5)
        assert errors.standard_error(0) == pytest.approx(np.std([0.5, 0, 0.5], ddof=1) / 3**0.5)

    def test_what_is_not_finite_counts_as_the_largest_error(self):
        errors = Errors.between(np.array([[[np.nan, 1.0]]]), np.ones((1, 1, 2)))
        assert errors.beyond(0) == 1
        assert errors.each.tolist() == [[[2.0, 0.0]]]

    def test_a_sample_that_is_missing_is_an_error(self):
        sampled = np.ones((2, 1, 1))
        sampled[0] = np.nan
        with pytest.raises(ValueError, match="1 sampled values are missing"):
            Errors.between(np.ones((2, 1, 1)), sampled)

    def test_rows_and_cube_are_inverse_in_any_order(self):
        value = torch.arange(3 * 4 * 2, dtype=torch.float64).reshape(3, 4, 2)
        numbers = torch.tensor([30, 10, 20])
        made = rows(numbers.tolist(), {"value": value})
        shuffled = np.random.default_rng(0).permutation(len(made["image"]))
        turned = {name: column[shuffled] for name, column in made.items()}
        np.testing.assert_array_equal(cube(turned, "value", numbers), value.numpy())

    def test_blocks_cover_everything_once(self):
        assert [list(part) for part in blocks(5, 2)] == [[0, 1], [2, 3], [4]]


def test_open_units_carry_most_of_the_variance(data_dir, mnist):
    """docs/experiments.md: why the old variance, a quarter of everything, is too small for the shipped LeNet."""
    images = nm.data.load("mnist", data_dir=data_dir).images[::3400]
    network = nm.two_stage(nm.zoo.pretrained("lenet"), images)
    is_open = (network.pre_activation(images) > 0).unsqueeze(1)

    def variance(weights):
        return (weights @ network.A).square().sum(-1).mean()

    of_open, of_closed = variance(network.B * is_open), variance(network.B * ~is_open)
    assert float(of_closed / of_open) < 0.5
    assert 0.3 < float(0.25 * variance(network.B) / of_open) < 0.6


class TestRuns:
    def test_a_run_that_computes_says_on_what(self, studied, tmp_path):
        settings = Settings(tmp_path, LocalEngine(["cpu"]), torch.device("cpu"))
        sweep = MonteCarloSweep("monte-carlo", studied, 4, samples=10)
        settings.run(sweep)
        settings.run(sweep)  # nothing was left to do
        assert settings.used == ["monte-carlo", "monte-carlo"]
        path = tmp_path / "monte-carlo" / "_runs.jsonl"
        assert len(path.read_text().splitlines()) == 1
        here = machine_here(torch.device("cpu"))
        assert machines(tmp_path, settings.used) == [here]
        path.write_text(path.read_text() + '{"date": "x", "device": "NVIDIA H200", "torch": "2.11.0"}\n{"date": "20')
        assert machines(tmp_path, settings.used) == [here, Machine("NVIDIA H200", "2.11.0")]
        origin = Origin.of(settings, "make it")
        assert (origin.command, origin.device) == ("make it", f"{here.device} and NVIDIA H200")
        assert origin.torch == f"{torch.__version__} and 2.11.0"

    def test_time_is_asked_for_before_other_long_work(self, tmp_path):
        settings = Settings(tmp_path, LocalEngine(["cpu"]), torch.device("cpu"), deadline=0.0)
        with pytest.raises(Unfinished, match="training: 2 of 6 networks done"):
            settings.require_time("training", 2, 6, "networks")
        replace(settings, deadline=None).require_time("training", 2, 6, "networks")

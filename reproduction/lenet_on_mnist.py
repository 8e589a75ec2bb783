"""What Tables 2, 3 and 4 share: sampled and computed moments of LeNet on MNIST's test images, and their errors.

They are sweeps that are run once in an output folder: `monte-carlo`, `monte-carlo-again` and `tightness`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netmoments import data, paper
from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.covariances import LowRank
from netmoments.data.images import LabelledImages, evenly_spread
from netmoments.gaussian import Gaussian
from netmoments.linearize.two_stage import two_stage
from netmoments.network import zoo
from netmoments.precision import full_precision, matmul
from netmoments.relu.marginal import relu_variance
from netmoments.sampling.monte_carlo import relative_difference
from netmoments.sweep.item import Columns
from reproduction.experiment import Settings
from reproduction.image_sweeps import SIGMAS, BlocksOfImages, StudiedImages, cube, rows, same_bits

BLOCK = {"cpu": 1, "cuda": 25}
"""Images per item: a second of work or more."""
LEAST_AGAIN = 5
"""Every tenth image is sampled twice, but at least so many."""
SAMPLED, SAMPLED_AGAIN, COMPUTED = "monte-carlo", "monte-carlo-again", "tightness"
"""The folders of the sweeps."""
CHUNK = {"cpu": 334, "cuda": 10_000}
"""Samples that go through the network at a time, enough to fill a CPU's cache or keep a GPU busy with MNIST's images.
"""
TERMS = 5
"""Terms of the series, as the authors ran it."""
VARIANCES = ("variance", "series", "theorem_2", "authors_old", "delta_variance")
MEANS = ("mean", "delta_mean")


def chosen_network(settings: Settings) -> nn.Module:
    """The paper's LeNet in eval mode and float32, with the shipped weights or those of the settings."""
    return zoo.pretrained("lenet", settings.weights).float()


def chosen_images(settings: Settings) -> tuple[Tensor, Tensor]:
    """Indices (N,) into MNIST's test set, and those images (N, 1, 28, 28): `settings.images`, evenly spread."""
    indices, chosen = spread_over_test(settings.images, settings.data_dir)
    return indices, chosen.images


def spread_over_test(count: int, data_dir: Path | None) -> tuple[Tensor, LabelledImages]:
    """`count` of MNIST's test images, evenly spread over the file, and where they are in it."""
    everything = data.load("mnist", data_dir=data_dir)
    if not 2 <= count <= len(everything):
        raise ValueError(f"images: from 2 to {len(everything)}, which is what MNIST's test set has here, got {count}")
    indices = evenly_spread(len(everything), count)
    return indices, everything.take(indices)


def studied_images(settings: Settings) -> StudiedImages:
    """The network and the images that the settings ask for."""
    numbers, images = chosen_images(settings)
    return StudiedImages(chosen_network(settings), images, numbers, settings.seed)


def shared_images(settings: Settings) -> StudiedImages:
    """The same for the tables that share sweeps; any of these sweeps already in the folder must be of their
    configuration.
    """
    studied = studied_images(settings)
    everywhere, few = torch.arange(len(studied.images)), _every_tenth(studied)
    settings.check(
        _sampling(settings, studied, everywhere, SAMPLED),
        _sampling(settings, studied, few, SAMPLED_AGAIN),
        TightnessSweep(COMPUTED, studied, block(settings)),
    )
    return studied


def block(settings: Settings) -> int:
    """The number of images per item."""
    return BLOCK[settings.device.type]


@dataclass(frozen=True, eq=False)
class Errors:
    """Absolute relative differences 2|x−y|/(|x|+|y|) of one quantity: (images, noise levels, logits)."""

    each: np.ndarray
    finite: np.ndarray
    """Where the computed value was a number; elsewhere the error counts as the largest possible, 2."""

    @classmethod
    def between(cls, computed: np.ndarray, sampled: np.ndarray) -> Errors:
        """The errors of computed values; every sampled value must be present."""
        if not np.isfinite(sampled).all():
            raise ValueError(f"{int((~np.isfinite(sampled)).sum())} sampled values are missing or not finite")
        finite = np.isfinite(computed)
        filled = np.where(finite, computed, sampled)
        error = relative_difference(torch.from_numpy(filled), torch.from_numpy(sampled)).numpy()
        return cls(np.where(finite, error, 2.0), finite)

    def beyond(self, level: int) -> int:
        """How many computed values at a noise level are NaN or infinite."""
        return int((~self.finite[:, level]).sum())

    @property
    def images(self) -> int:
        return len(self.each)

    def mean(self, level: int, logit: int) -> float:
        return float(self.each[:, level, logit].mean())

    def spread(self, level: int, logit: int) -> float:
        """Standard deviation over images."""
        return float(self.each[:, level, logit].std(ddof=1))

    def average(self, level: int) -> float:
        """The mean over images and logits: the paper's average row."""
        return float(self.each[:, level].mean())

    def average_spread(self, level: int) -> float:
        """The mean over logits of the standard deviations over images, as in the paper's average row."""
        return float(self.each[:, level].std(axis=0, ddof=1).mean())

    def standard_error(self, level: int) -> float:
        """The standard error of `average`, from the spread between images."""
        return float(self.each[:, level].mean(axis=1).std(ddof=1) / self.images**0.5)

    def resolution(self, level: int) -> float:
        """For differences between two sampling runs: the error that exact values would show against one of them.

        Two runs differ by √2 times as much as either differs from the true values.
        """
        return self.average(level) / 2**0.5


@dataclass(frozen=True, eq=False)
class MonteCarloSweep(BlocksOfImages):
    """Rows: image, sigma, logit, mean, variance. Samples also depend on the name: another one is an independent run."""

    samples: int

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.studied.description(), "samples": self.samples, "block": self.block}

    def rows_of(self, studied: StudiedImages, places: range) -> Columns:
        found = [
            sampled_moments(
                studied.network, studied.images[place], studied.factor(place), self.samples,
                studied.generator(self.name, place),
            )
            for place in places
        ]  # fmt: skip
        mean, variance = (torch.stack(values) for values in zip(*found, strict=True))
        return rows(studied.numbers[places.start : places.stop].tolist(), {"mean": mean, "variance": variance})


@torch.no_grad()
def sampled_moments(
    network: nn.Module, image: Tensor, factor: Tensor, samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the scores under N(image, σ²FFᵀ) for every noise level, (levels, scores), in float64.

    The levels share their normal draws, as they share the covariance. Sums are centred at the image's own scores.
    """
    with full_precision(), same_bits():
        centre = network(image[None]).double()
        first, second = (centre.new_zeros(len(SIGMAS), centre.shape[1]) for _ in range(2))
        chunk = CHUNK[image.device.type]
        for start in range(0, samples, chunk):
            count = min(chunk, samples - start)
            normal = torch.randn(count, image.numel(), dtype=image.dtype, device=image.device, generator=generator)
            deviation = (normal @ factor.T).reshape(count, *image.shape)
            for level, sigma in enumerate(SIGMAS):
                delta = network(image + sigma * deviation).double() - centre
                first[level] += delta.sum(0)
                second[level] += (delta * delta).sum(0)
    shift = first / samples
    return centre + shift, (second - samples * shift**2) / (samples - 1)


def pooled(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], samples: int) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of two runs of `samples` each, pooled: Σ(x − m)² = Σ₁ + Σ₂ + n (m₁ − m₂)²/2."""
    squares = (samples - 1) * (first[1] + second[1]) + samples * (first[0] - second[0]).square() / 2
    return (first[0] + second[0]) / 2, squares / (2 * samples - 1)


@dataclass(frozen=True, eq=False)
class SampledScores:
    """Sampled means and variances of the scores, (images, noise levels, logits)."""

    places: np.ndarray
    """Which of the studied images."""
    mean: np.ndarray
    variance: np.ndarray
    seconds: float


def sampled_scores(settings: Settings, studied: StudiedImages, name: str = SAMPLED) -> SampledScores:
    """Monte Carlo for every image, once for all tables."""
    return _sampled(settings, studied, torch.arange(len(studied.images)), name)


def sampled_again(settings: Settings, studied: StudiedImages, name: str = SAMPLED_AGAIN) -> SampledScores:
    """A second, independent run on every tenth image, which shows how far two runs are apart."""
    return _sampled(settings, studied, _every_tenth(studied), name)


def _every_tenth(studied: StudiedImages) -> Tensor:
    count = min(len(studied.images), max(LEAST_AGAIN, len(studied.images) // 10))
    return evenly_spread(len(studied.images), count)


def _sampling(settings: Settings, studied: StudiedImages, places: Tensor, name: str) -> MonteCarloSweep:
    chosen = StudiedImages(studied.network, studied.images[places], studied.numbers[places], studied.seed)
    return MonteCarloSweep(name, chosen, block(settings), settings.samples)


def _sampled(settings: Settings, studied: StudiedImages, places: Tensor, name: str) -> SampledScores:
    found = settings.run(_sampling(settings, studied, places, name))
    mean, variance = (cube(found.columns, column, studied.numbers[places]) for column in ("mean", "variance"))
    return SampledScores(places.numpy(), mean, variance, found.seconds)


def floor(first: SampledScores, again: SampledScores) -> dict[str, Errors]:
    """The differences between two sampling runs, for mean and variance."""
    return {
        "mean": Errors.between(first.mean[again.places], again.mean),
        "variance": Errors.between(first.variance[again.places], again.variance),
    }


@dataclass(frozen=True, eq=False)
class TightnessSweep(BlocksOfImages):
    """The two-stage linearization at each image itself. Rows: image, sigma, logit, and the values of `moments_at`."""

    layer: int = -1

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.studied.description(), "block": self.block, "layer": self.layer, "terms": TERMS}

    def rows_of(self, studied: StudiedImages, places: range) -> Columns:
        images = studied.images[places.start : places.stop]
        factors = torch.stack([studied.factor(place) for place in places])
        with same_bits():
            network = two_stage(studied.network, images, self.layer)
        values = moments_at(network, images, factors) | delta_method(network, images, factors)
        return rows(studied.numbers[places.start : places.stop].tolist(), values)


@torch.no_grad()
def moments_at(network: AffineReluAffine, images: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """The mean and all variances that are compared, (images, levels, outputs), for covariances σ²FFᵀ.

    `mean` and `variance` are exact for the linearized network; `series` is Lemma 4 with 5 terms as the authors ran it,
    `theorem_2` the old variance to the letter, `authors_old` as the authors ran it.
    """
    levels = [Gaussian(images, LowRank(sigma * factors)) for sigma in SIGMAS]
    return core_moments_at(network, images, factors) | {
        "series": _by_level(lambda noise: paper.variance_series_by_pairs(network, noise, TERMS), levels),
        "theorem_2": _scaled(paper.variance_zero_mean(network, Gaussian(images, LowRank(factors)))),
    }


@torch.no_grad()
def core_moments_at(network: AffineReluAffine, images: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """The mean, the exact variance, and the old one as the authors ran it: what Table 4 needs."""
    levels = [Gaussian(images, LowRank(sigma * factors)) for sigma in SIGMAS]
    pairs = paper.pairs_variance_zero_mean(network, Gaussian(images, LowRank(factors)))
    return {
        "mean": _by_level(network.mean, levels),
        "variance": _by_level(network.variance, levels),
        "authors_old": _scaled(pairs) + _by_level(lambda noise: own_variance(network, noise), levels),
    }


@torch.no_grad()
def delta_method(network: AffineReluAffine, images: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """The scores at the image as the mean, and JΣJᵀ as the variance, J being the network's own derivative there."""
    open_units = network.pre_activation(images) > 0
    slope = matmul(network.B * open_units.unsqueeze(-2), network.A)
    slope = slope if network.D is None else slope + network.D
    scores = network(images)
    return {
        "delta_mean": scores.unsqueeze(1).expand(-1, len(SIGMAS), -1),
        "delta_variance": _scaled(matmul(slope, factors).square().sum(-1)),
    }


def own_variance(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """The contribution of the units' own variances to those of the outputs: Σ b² Var relu(z)."""
    mean = network.pre_activation(noise.mean)
    deviation = noise.covariance.push_diagonal(network.A).sqrt()
    return (network.B**2 * relu_variance(mean, deviation).unsqueeze(-2)).sum(-1)


def _by_level(quantity: Callable[[Gaussian], Tensor], levels: Sequence[Gaussian]) -> Tensor:
    return torch.stack([quantity(noise) for noise in levels], 1)


def _scaled(at_one: Tensor) -> Tensor:
    """Scale a variance that grows as σ², from (images, outputs) at σ = 1 to (images, levels, outputs)."""
    squares = torch.tensor([sigma**2 for sigma in SIGMAS], dtype=at_one.dtype, device=at_one.device)
    return at_one.unsqueeze(1) * squares.unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class ComputedScores:
    """Errors of every computed quantity against sampling, the values themselves, and the time they took."""

    errors: dict[str, Errors]
    values: dict[str, np.ndarray]
    seconds: float


def computed_scores(
    settings: Settings, studied: StudiedImages, against: SampledScores, name: str = COMPUTED
) -> ComputedScores:
    """Run the two-stage linearization at each image, l = 3, and everything else that the tables compare."""
    found = settings.run(TightnessSweep(name, studied, block(settings)))
    values = {column: cube(found.columns, column, studied.numbers) for column in (*MEANS, *VARIANCES)}
    errors = {column: Errors.between(values[column], against.mean) for column in MEANS}
    errors |= {column: Errors.between(values[column], against.variance) for column in VARIANCES}
    return ComputedScores(errors, values, found.seconds)

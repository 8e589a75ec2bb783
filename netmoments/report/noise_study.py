"""What noise does to a network's answers on a set of images: what was asked, and what came out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.covariances import Isotropic
from netmoments.data.images import LabelledImages
from netmoments.gaussian import Gaussian
from netmoments.moments.methods import TwoStage
from netmoments.moments.output_moments import output_moments
from netmoments.moments.result import OutputMoments
from netmoments.network.model import NetworkModel, network_of
from netmoments.precision import full_precision
from netmoments.progress import Progress
from netmoments.report.arguments import with_classes_of
from netmoments.report.attack_study import AttackStudy, NotAttacked, few_attacks
from netmoments.sampling.monte_carlo import class_frequencies, monte_carlo

CALLER = "report"
RELATIVE_LEVELS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Noise levels of the accuracy curve, in units of the chosen one."""


@dataclass(frozen=True)
class StudyConfig:
    """How much noise, and how it is computed and checked."""

    sigma: float
    layer: int | str = -1
    check: int = 6
    """Images that are also sampled."""
    samples: int = 2000
    seed: int = 0
    scores: int = 10
    """How many of the largest scores are followed when there are many classes."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    attacks: int = 4
    """Images that noise is made for, to fool the network."""

    def __post_init__(self) -> None:
        if not 0 < self.sigma < float("inf"):
            raise ValueError(f"{CALLER}: sigma must be a positive number (pixels are in [0, 1]), got {self.sigma}")
        if self.check < 0 or self.attacks < 0 or self.samples < 2 or self.scores < 2:
            raise ValueError(
                f"{CALLER}: check and attacks must be ≥ 0, samples ≥ 2 and scores ≥ 2, got {self.check}, "
                f"{self.attacks}, {self.samples} and {self.scores}"
            )

    @property
    def levels(self) -> tuple[float, ...]:
        return tuple(self.sigma * level for level in RELATIVE_LEVELS)


@dataclass(frozen=True, eq=False)
class Check:
    """One image sampled, beside what was computed for it."""

    image: int
    flips: Tensor
    """Sampled flip frequencies at the levels of the curve."""
    kept: Tensor
    """Sampled frequencies of what the curve counts: the right answer, or the same one where there are no labels."""
    mean: Tensor
    deviation: Tensor
    """Sampled mean and standard deviation of the scores that are shown, at the chosen noise."""
    draws: Tensor
    """A few sampled scores, (draws, k)."""
    noisy: Tensor
    """A few noisy copies of the image."""
    noisy_classes: Tensor


@dataclass(frozen=True, eq=False)
class Study:
    """Everything the report shows. N images, k scores shown, L noise levels."""

    config: StudyConfig
    images: LabelledImages
    classes: tuple[str, ...]
    scores: Tensor
    """Without noise, (N, classes)."""
    moments: OutputMoments
    """At the chosen noise, of the k scores that are largest without noise."""
    probabilities: Tensor
    """How often each of the k classes wins at the chosen noise, (N, k)."""
    flips: Tensor
    """How often another class than the predicted one wins, at each level, (N, L)."""
    right: Tensor | None
    """How often the right class wins, (N, L); None without labels."""
    checks: tuple[Check, ...]
    attacks: AttackStudy | NotAttacked | None = None
    """Noise made to fool the network, or why there is none; None where none was asked for."""

    @property
    def predicted(self) -> Tensor:
        return self.scores.argmax(1)

    @property
    def chosen_level(self) -> int:
        return RELATIVE_LEVELS.index(1.0)

    @property
    def flip(self) -> Tensor:
        """At the chosen noise, (N,)."""
        return self.flips[:, self.chosen_level]

    @property
    def ranking(self) -> Tensor:
        """The images, the most fragile first."""
        return self.flip.argsort(descending=True, stable=True)

    @property
    def clean_accuracy(self) -> float | None:
        labels = self.images.labels
        return None if labels is None else float((self.predicted == labels).double().mean())

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(sigma, share of answers that are right; without labels, that stay the same), beginning without noise."""
        return self._curve_of(torch.arange(len(self.images)))

    @property
    def checked_curve(self) -> list[tuple[float, float]]:
        """The same of the images that were sampled."""
        return self._curve_of(torch.tensor([check.image for check in self.checks]))

    @property
    def sampled_curve(self) -> list[tuple[float, float, float]]:
        """(sigma, share, standard error) of the sampled images."""
        kept = torch.stack([check.kept for check in self.checks])
        error = (kept * (1 - kept) / self.config.samples).sum(0).sqrt() / len(kept)
        return list(zip(self.config.levels, kept.mean(0).tolist(), error.tolist(), strict=True))

    def _curve_of(self, images: Tensor) -> list[tuple[float, float]]:
        labels = self.images.labels
        clean = torch.ones(len(images)) if labels is None else (self.predicted == labels)[images]
        shares = self.kept[images].double().mean(0).tolist()
        return [(0.0, float(clean.double().mean())), *zip(self.config.levels, shares, strict=True)]

    @property
    def largest_check_error(self) -> float | None:
        """The largest difference between computed and sampled flip probability at the chosen noise."""
        level = self.chosen_level
        gaps = [abs(float(self.flips[c.image, level]) - float(c.flips[level])) for c in self.checks]
        return max(gaps) if gaps else None

    def rival(self, number: int) -> int:
        """The class that wins most often in place of the predicted one."""
        assert self.moments.outputs is not None
        outputs = self.moments.outputs[number]
        mine = outputs == self.predicted[number]
        others = self.probabilities[number].masked_fill(mine, -1.0)
        if float(others.max()) <= 0:
            others = self.moments.mean[number].masked_fill(mine, float("-inf"))
        return int(outputs[others.argmax()])

    @property
    def followed(self) -> int:
        """How many scores of each image were followed."""
        return self.moments.mean.shape[1]

    @property
    def kept(self) -> Tensor:
        """What the curve is the mean of, (N, L): the right answer, or the same one where there are no labels."""
        return 1 - self.flips if self.right is None else self.right

    def class_name(self, number: int) -> str:
        return self.classes[number] if self.classes else str(number)


ALL_SCORES = 20
"""Up to so many classes, the scores of all are followed; of more, only the largest, which keeps thousands cheap."""


def study(network: Any, images: LabelledImages, config: StudyConfig, classes: tuple[str, ...] = ()) -> Study:
    """Compute a `Study`: two-stage moments of every image at every level, samples of a few."""
    network = network_of(network.to(config.device) if isinstance(network, nn.Module) else network, CALLER)
    pixels = images.images.to(config.device)
    count = NetworkModel.of(network, pixels, CALLER).outputs
    if count < 2:
        raise ValueError(
            f"{CALLER}: a class wins against others, and the network has only {count} score; make it two, [0, score] "
            f"for a yes-or-no network"
        )
    images, names = with_classes_of(images, classes, count, CALLER)
    with torch.no_grad(), full_precision():
        scores = torch.cat([network(part) for part in pixels.split(256)]).cpu()
    parts = []
    with Progress("images", len(images)) as progress:
        for span in torch.arange(len(images)).split(_together(images, config.device)):
            parts.append(_computed(network, pixels[span], scores[span], _labels(images, span), config))
            progress.advance(len(span))
    moments = _joined([part.moments for part in parts])
    flips = torch.cat([part.flips for part in parts])
    right = None if images.labels is None else torch.cat([part.right for part in parts if part.right is not None])
    probabilities = torch.cat([part.probabilities for part in parts])
    found = Study(config, images, names, scores, moments, probabilities, flips, right, ())
    checks = tuple(_check(network, pixels, found, number, config) for number in checked_images(found))
    return dataclasses.replace(found, checks=checks, attacks=_attacks(network, found))


@dataclass(frozen=True, eq=False)
class _Part:
    moments: OutputMoments
    probabilities: Tensor
    flips: Tensor
    right: Tensor | None


def _computed(network: nn.Module, pixels: Tensor, scores: Tensor, labels: Tensor | None, config: StudyConfig) -> _Part:
    """Moments of some images at every level; the linearization of each image is shared by the levels."""
    rows = _followed(scores, labels, config.scores)
    levels = torch.tensor(config.levels, dtype=pixels.dtype, device=pixels.device)
    means = pixels.unsqueeze(1).expand(-1, len(levels), *pixels.shape[1:])
    spread = Isotropic(levels.square().expand(len(pixels), -1), pixels[0].numel())
    noise = Gaussian(means, spread, event_ndim=pixels.dim() - 1)
    wide = rows.unsqueeze(1).expand(-1, len(levels), -1).reshape(-1, rows.shape[1])
    every = output_moments(network, noise, TwoStage(layer=config.layer), wide, check=0).to("cpu")
    chances = every.class_probabilities()
    mine = rows == scores.argmax(1, keepdim=True)
    flips = chances.masked_fill(mine.unsqueeze(1), 0.0).sum(-1)
    right = None
    if labels is not None:
        right = chances.masked_fill((rows != labels.unsqueeze(1)).unsqueeze(1), 0.0).sum(-1)
    place = RELATIVE_LEVELS.index(1.0)
    assert every.covariance is not None
    chosen = OutputMoments(
        every.mean[:, place], every.variance[:, place], every.covariance[:, place], every.method, every.cut, rows
    )
    return _Part(chosen, chances[:, place], flips, right)


def _followed(scores: Tensor, labels: Tensor | None, largest: int) -> Tensor:
    """The scores that are followed: all of a few classes, else the largest ones and the right one."""
    count = scores.shape[1]
    if count <= max(ALL_SCORES, largest):
        return torch.arange(count).expand(len(scores), -1)
    rows = scores.topk(largest, 1).indices
    if labels is not None:
        missing = ~(rows == labels.unsqueeze(1)).any(1)
        rows[missing, -1] = labels[missing]
    return rows


def checked_images(found: Study) -> list[int]:
    """Half of the checks go to the most fragile images, the others evenly down the ranking."""
    ranking = found.ranking.tolist()
    count = min(found.config.check, len(ranking))
    fragile = (count + 1) // 2
    rest = ranking[fragile:]
    spread = [rest[(2 * i + 1) * len(rest) // (2 * (count - fragile))] for i in range(count - fragile)]
    return ranking[:fragile] + spread


def _check(network: nn.Module, pixels: Tensor, found: Study, number: int, config: StudyConfig) -> Check:
    """Sample one image at every level of the curve."""
    labels, moments, scores = found.images.labels, found.moments, found.scores
    label = None if labels is None else int(labels[number])
    image, predicted = pixels[number], int(scores[number].argmax())
    won = torch.stack(
        [
            class_frequencies(network, Gaussian(image, std=sigma), config.samples, seed=config.seed + level).cpu()
            for level, sigma in enumerate(config.levels)
        ]
    )
    noise = Gaussian(image, std=config.sigma)
    assert moments.outputs is not None
    rows = moments.outputs[number]
    sampled = monte_carlo(lambda x: network(x)[:, rows.to(x.device)], noise, config.samples, seed=config.seed)
    noisy = noise.sample(40, generator=torch.Generator(image.device).manual_seed(config.seed))
    with torch.no_grad(), full_precision():
        draws = network(noisy).cpu()
    return Check(
        number,
        1 - won[:, predicted],
        won[:, predicted if label is None else label],
        sampled.mean.cpu(),
        sampled.variance.sqrt().cpu(),
        draws[:, rows],
        noisy[:5].cpu(),
        draws[:5].argmax(1),
    )


def _attacks(network: nn.Module, found: Study) -> AttackStudy | NotAttacked | None:
    """Noise made to fool the network, on a few of the images that it gets right; None where none was asked for."""
    config = found.config
    if not config.attacks:
        return None
    attack = SparseSmooth(layer=config.layer, seed=config.seed)
    return few_attacks(network, found.images, found.classes, found.predicted, attack, config.attacks, config.device)


def _joined(parts: list[OutputMoments]) -> OutputMoments:
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("mean", "variance", "covariance", "outputs")
    }
    return OutputMoments(**tensors, method=parts[0].method, cut=parts[0].cut)


def _labels(images: LabelledImages, span: Tensor) -> Tensor | None:
    return None if images.labels is None else images.labels[span]


def _together(images: LabelledImages, device: torch.device) -> int:
    """Images between two steps of the progress bar."""
    return max(1, (64 if device.type == "cuda" else 16) * 784 // max(784, images.event_shape.numel()))

"""Computing a study: two-stage moments of every image at every noise level, samples of a few."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.attacks import SparseSmooth
from netmoments.data import LabelledImages
from netmoments.gaussian import Gaussian, Isotropic
from netmoments.moments.front_door import output_moments
from netmoments.moments.result import OutputMoments
from netmoments.network.inspection import as_network, inspect
from netmoments.precision import full_precision
from netmoments.progress import Progress
from netmoments.report.attack_conduct import few_attacks
from netmoments.report.attack_study import AttackStudy, NotAttacked
from netmoments.report.class_names import with_classes_of
from netmoments.report.study import CALLER, RELATIVE_LEVELS, Check, Study, StudyConfig
from netmoments.sampling import class_frequencies, monte_carlo

ALL_SCORES = 20
"""Up to so many classes, the scores of all are followed; of more, only the largest, which keeps thousands cheap."""


def study(network: Any, images: LabelledImages, config: StudyConfig, classes: tuple[str, ...] = ()) -> Study:
    """Compute a `Study`: two-stage moments of every image at every level, samples of a few."""
    network = as_network(network.to(config.device) if isinstance(network, nn.Module) else network, CALLER)
    pixels = images.images.to(config.device)
    count = inspect(network, pixels, CALLER).output.shape[1]
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
    every = output_moments(network, noise, "two-stage", wide, layer=config.layer).to("cpu")
    chances = every.class_probabilities()
    mine = rows == scores.argmax(1, keepdim=True)
    flips = chances.masked_fill(mine.unsqueeze(1), 0.0).sum(-1)
    right = None
    if labels is not None:
        right = chances.masked_fill((rows != labels.unsqueeze(1)).unsqueeze(1), 0.0).sum(-1)
    place = RELATIVE_LEVELS.index(1.0)
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

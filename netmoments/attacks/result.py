"""What an attack found for each image, and what the network says to it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.attacks.evaluation import Bounds, Success, structural_similarity
from netmoments.attacks.primal_dual import total_variation
from netmoments.gaussian import Gaussian


class SkippedImage(NamedTuple):
    """An image that was not attacked, because the network gets it wrong without any noise; `place` is its index."""

    place: int
    label: int
    predicted: int


@dataclass(frozen=True, eq=False)
class AttackResult:
    """Noise N(μ, σ²I) for each of N attacked images; all tensors have one entry an image.

    `places` are the indices of these images among the given ones; those that the network gets wrong by itself are in
    `skipped`. μ is (N, *event). `success` is measured on the network, with Wilson's 95 % interval, on fresh samples.

    >>> from netmoments import attacks, zoo
    >>> digits, image = zoo.pretrained("digits"), torch.zeros(1, 1, 8, 8)
    >>> result = attacks.SparseSmooth(samples=100, polish=4)(digits, image, digits(image).argmax(1))
    >>> result.mu.shape, bool(result.success.low[0] <= result.success.rate[0])
    (torch.Size([1, 1, 8, 8]), True)
    """

    attack: str
    places: Tensor
    images: Tensor
    labels: Tensor
    targets: Tensor | None
    skipped: tuple[SkippedImage, ...]
    mu: Tensor
    sigma: Tensor
    towards: Tensor
    """The target, or the rival class whose problem was solved best."""
    gamma: Tensor
    """γ of the problem that was solved last: its margins had to come down to −γ."""
    margin: Tensor
    """Expected margin by the formula, linearized at the image; where it is below 0, the formula expects success."""
    network_margin: Tensor
    """Margin of the network's mean scores, from unclipped samples, against the best other class."""
    success: Success
    """How often samples fool the network, as they are."""
    success_clipped: Success | None
    """How often samples that are cut to the bounds fool it; None without bounds."""
    answers: Tensor
    """The class that most samples get, (N,)."""
    feasible: Tensor
    """Whether μ satisfies the problem that was solved last: its margins are at −γ or below, and it is in its box."""
    fooled: Tensor
    """Whether the network is fooled as the settings ask, as far as the samples can tell."""
    polished: Tensor
    """Steps on the network itself after those on the formula; 0 where the formula was enough, or wanted alone."""
    iterations: Tensor
    """All steps: of the solver on the formula, and `polished` on the network."""
    gap: Tensor
    """How much better a solution could be at most. For sparse and smooth noise it is the share by which the objective
    could be lower, by duality, and 1 where this one is not feasible. Within a box it is how much further the linearized
    margin could fall, as a share of its fall so far."""
    bounds: Bounds | None
    zero: float
    """|μ| up to this counts as zero: a thousandth of a grey level."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def noise(self) -> Gaussian:
        """The distribution of the noisy images."""
        return Gaussian(self.images + self.mu, std=self.sigma.reshape(-1, 1, 1, 1))

    @property
    def surrogate_error(self) -> Tensor:
        """The network's sampled margin less that of the formula, which is against `towards`."""
        return self.network_margin - self.margin

    @property
    def l0(self) -> Tensor:
        """How many pixels are changed, counted in every channel."""
        return (self.mu.abs() > self.zero).flatten(1).sum(1)

    @property
    def sparsity(self) -> Tensor:
        """The share of the pixels that are not changed."""
        return 1 - self.l0 / self.mu[0].numel() if len(self) else self.l0.double()

    @property
    def l1(self) -> Tensor:
        return self.mu.abs().flatten(1).sum(1)

    @property
    def l2(self) -> Tensor:
        return self.mu.flatten(1).norm(dim=1)

    @property
    def linf(self) -> Tensor:
        return self.mu.abs().flatten(1).amax(1)

    @property
    def tv(self) -> Tensor:
        """Isotropic total variation of μ."""
        return total_variation(self.mu)

    @property
    def ssim(self) -> Tensor:
        """Structural similarity of M and M + μ."""
        span = 1.0 if self.bounds is None else self.bounds[1] - self.bounds[0]
        return structural_similarity(self.images, self.images + self.mu, span)

    def to(self, device: torch.device | str) -> AttackResult:
        """This result on another device."""

        def moved(value: Any) -> Any:
            if isinstance(value, Success):
                return Success(value.rate.to(device), value.samples)
            return value.to(device) if isinstance(value, Tensor) else value

        return AttackResult(**{field.name: moved(getattr(self, field.name)) for field in fields(self)})

    def samples(self, count: int, seed: int = 0) -> Tensor:
        """Noisy images (count, N, C, H, W), not cut to the bounds."""
        generator = torch.Generator(self.images.device).manual_seed(seed)
        return self.noise.sample(count, generator=generator)

    def records(self) -> list[dict[str, object]]:
        """One dictionary of plain numbers for each attacked image."""
        clipped = self.success_clipped
        columns: dict[str, list[object]] = {
            "place": self.places.tolist(),
            "label": self.labels.tolist(),
            "target": [None] * len(self) if self.targets is None else self.targets.tolist(),
            "towards": self.towards.tolist(),
            "answer": self.answers.tolist(),
            "sigma": self.sigma.double().tolist(),
            "gamma": self.gamma.double().tolist(),
            "margin": self.margin.double().tolist(),
            "network_margin": self.network_margin.double().tolist(),
            "surrogate_error": self.surrogate_error.double().tolist(),
            "success": self.success.rate.tolist(),
            "success_low": self.success.low.tolist(),
            "success_high": self.success.high.tolist(),
            "success_clipped": [None] * len(self) if clipped is None else clipped.rate.tolist(),
            "success_clipped_low": [None] * len(self) if clipped is None else clipped.low.tolist(),
            "success_clipped_high": [None] * len(self) if clipped is None else clipped.high.tolist(),
            "feasible": self.feasible.tolist(),
            "fooled": self.fooled.tolist(),
            "polished": self.polished.tolist(),
            "iterations": self.iterations.tolist(),
            "gap": self.gap.double().tolist(),
        }
        for name in ("l0", "sparsity", "l1", "l2", "linf", "tv", "ssim"):
            columns[name] = getattr(self, name).tolist() if len(self) else []
        return [{name: column[number] for name, column in columns.items()} for number in range(len(self))]

    def __repr__(self) -> str:
        if not len(self):
            return f"AttackResult({self.attack}, nothing attacked, {len(self.skipped)} skipped)"
        return (
            f"AttackResult({self.attack}, {len(self)} images, success {float(self.success.rate.mean()):.3f}, "
            f"sparsity {float(self.sparsity.mean()):.3f}, {int(self.fooled.sum())} fooled as asked, "
            f"{len(self.skipped)} skipped)"
        )


def joined(parts: list[AttackResult]) -> AttackResult:
    """The results of several groups of images of one attack as one."""
    if len(parts) == 1:
        return parts[0]
    values: dict[str, object] = {}
    for field in fields(AttackResult):
        column = [getattr(part, field.name) for part in parts]
        if isinstance(column[0], Tensor):
            values[field.name] = torch.cat(column)
        elif isinstance(column[0], Success):
            values[field.name] = Success(torch.cat([success.rate for success in column]), column[0].samples)
        else:
            values[field.name] = column[0]
    return AttackResult(**values)  # type: ignore[arg-type]

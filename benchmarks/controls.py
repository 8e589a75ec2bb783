"""What control variates can explain of a network's outputs under noise: lines, quadratics, cubics.

`python -m benchmarks.controls GALLERY [--networks NAME …] [--sigmas 0.01 0.05] [--pairs 4000] [--image 8]`. Half-sums e
and half-differences o of outputs at mirrored noise m ± δ are the parts even and odd in δ. Printed are means over the
outputs of

    even            the share of the variance that is even: no linear control touches it, and a mean needs at least so
                    many independent samples, times 1/tolerance²
    odd: 16, 64     the share of the odd part that expected slopes explain, from gradients at so many points
    cubics          the same by all products of three of the slopes' directions as well
    even: squares   the share of the even part that products of the slopes' directions explain; what these leave, no
                    quasi-Monte Carlo along those directions can find either, as far as it is quadratic
    leading 16, 32  the same by all products along the leading directions of gradients at 48 points of the noise

Shares are of values that were not fitted to; a negative one says that fitting so many coefficients does harm.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.measure import machine
from benchmarks.sampler import Gallery

FOLDS = 4
BATCH = 250
GRADIENTS, MORE_GRADIENTS, SPREAD_GRADIENTS = 16, 64, 48
LEADING = (16, 32)


def values(network: nn.Module, image: Tensor, deviations: Tensor) -> Tensor:
    """Outputs (N, d) at image + δ, in float64."""
    parts = deviations.reshape(-1, *image.shape).split(BATCH)
    with torch.no_grad():
        return torch.cat([network(image + part).flatten(1) for part in parts]).double()


def gradients(network: nn.Module, image: Tensor, deviations: Tensor) -> Tensor:
    """Gradients (N, d, n) of all outputs."""
    inputs = (image + deviations.reshape(-1, *image.shape)).requires_grad_()
    outputs = network(inputs).flatten(1)
    slopes = [torch.autograd.grad(one.sum(), inputs, retain_graph=True)[0].flatten(1) for one in outputs.unbind(1)]
    return torch.stack(slopes, 1).double()


def explained(controls: Tensor, targets: Tensor) -> float:
    """The share of the variance of targets (N, d) that a regression on controls (N, c) explains, averaged over d.

    Each fold is explained by coefficients from the others.
    """
    left = torch.zeros_like(targets)
    for fold in torch.arange(len(targets)).tensor_split(FOLDS):
        others = torch.ones(len(targets), dtype=torch.bool)
        others[fold] = False
        middle, level = controls[others].mean(0), targets[others].mean(0)
        centred = controls[others] - middle
        gram = centred.mT @ centred
        gram = gram + 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        slopes = torch.linalg.solve(gram, centred.mT @ (targets[others] - level))
        left[fold] = targets[fold] - level - (controls[fold] - middle) @ slopes
    return float((1 - left.square().mean(0) / targets.var(0)).mean())


def products(lines: Tensor) -> Tensor:
    """All products of two of the columns (N, k)."""
    first, second = torch.triu_indices(lines.shape[1], lines.shape[1])
    return lines[:, first] * lines[:, second]


def triples(lines: Tensor) -> Tensor:
    """All products of three of the columns (N, k)."""
    every = torch.combinations(torch.arange(lines.shape[1]), 3, with_replacement=True)
    return lines[:, every].prod(-1)


def shares(network: nn.Module, image: Tensor, sigma: float, pairs: int) -> dict[str, float]:
    """The numbers of a row, by their names."""

    def noise(count: int) -> Tensor:
        return sigma * torch.randn(count, image.numel())

    torch.manual_seed(0)
    few, many, spread = (
        gradients(network, image, noise(count)) for count in (GRADIENTS, MORE_GRADIENTS, SPREAD_GRADIENTS)
    )
    deviations = noise(pairs)
    above, below = values(network, image, deviations), values(network, image, -deviations)
    odd, even = (above - below) / 2, (above + below) / 2
    lines = [deviations.double() @ slopes.mean(0).mT for slopes in (few, many)]
    lines = [line / line.std(0).clamp(min=1e-300) for line in lines]
    found = {
        "even": float((even.var(0) / (even.var(0) + odd.var(0))).mean()),
        "odd: 16": explained(lines[0], odd),
        "64": explained(lines[1], odd),
        "cubics": explained(torch.cat([lines[1], triples(lines[1])], 1), odd),
        "even: squares": explained(products(lines[1]), even),
    }
    directions = torch.linalg.svd(spread.flatten(0, 1), full_matrices=False)[2]
    for count in LEADING:
        found[f"leading {count}"] = explained(products(deviations.double() @ directions[:count].mT / sigma), even)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gallery", type=Path)
    parser.add_argument(
        "--networks", nargs="+", default=["mlp", "vgg", "resnet8", "resnet20", "mobilenet", "vit", "series"]
    )
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.01, 0.05, 0.3])
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--image", type=int, default=8)
    asked = parser.parse_args()
    gallery = Gallery(asked.gallery, torch.device("cpu"))
    print(machine())
    for name in asked.networks:
        network, image = gallery.network(name), gallery.images(name, [asked.image])[0]
        for sigma in asked.sigmas:
            row = shares(network, image, sigma, asked.pairs)
            print(
                f"{name:14s}{sigma:6.2f}  " + "  ".join(f"{label} {share:.3f}" for label, share in row.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()

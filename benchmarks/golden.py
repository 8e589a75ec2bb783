"""Golden outputs: compare some sixty calls of every kind with what they gave when recorded, to show what a change kept.

    python -m benchmarks.golden record FILE           # write what the calls give now
    python -m benchmarks.golden compare [FILE]        # a line for each call; exit status 1 if any is not as recorded

The calls cover every method with every structure of covariance, both dtypes, residual, smooth and black-box networks,
derivatives, flip probabilities, the kernels, expected logits, attacks, and the record that the attack report writes.
They were recorded before methods became values. Since then sampling and sketches were recorded anew when their random
numbers changed, and layerwise when it became tighter. The default samples black boxes, so its call is recorded anew
when sampling changes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.covariances import Covariance
from netmoments.moments.methods import Method

RECORD = Path(__file__).parent / "records" / "golden.json"
"""The record of the code before methods became values."""

Fields = Mapping[str, Any]
Call = Callable[[], Fields]

DOUBLE, SINGLE, ATTACK = 1e-9, 1e-4, 1e-3
ITERATED = ("attack",)
"""Prefixes of the names of calls that run attacks."""


def calls() -> dict[str, Call]:
    """Every call by name."""
    every = (_by_covariance, _by_sampling, _by_network, _with_options, _linearized, _derived, _kernels, _attacked)
    return {name: call for group in every for name, call in group()}


def _by_covariance() -> Iterator[tuple[str, Call]]:
    network, images = convolutional(), pictures()
    for method in ("auto", "layerwise", "sketch", "two-stage", "linear"):
        for structure, covariance in covariances(64).items():
            noise = nm.Gaussian(images, covariance, event_ndim=3)
            yield f"cnn/{method}/{structure}", partial(moments, network, noise, method)


def _by_sampling() -> Iterator[tuple[str, Call]]:
    network, noise = convolutional(), nm.Gaussian(pictures(), std=0.1)
    yield "cnn/sampling", partial(moments, network, noise, nm.Sampling(400, seed=3))
    for control in ("sketch", "two-stage", "linear"):
        method = nm.Sampling(200, control=control, seed=3)
        yield f"cnn/sampling/{control}", partial(moments, network, noise, method)


def _by_network() -> Iterator[tuple[str, Call]]:
    single, pixels = convolutional(torch.float32), pictures(dtype=torch.float32)
    for method in ("layerwise", "sketch", "two-stage", "linear"):
        yield f"cnn32/{method}", partial(moments, single, nm.Gaussian(pixels, std=0.2), method)
        planes = nm.Gaussian(pictures(shape=(2, 6, 6)), std=0.3)
        yield f"res/{method}", partial(moments, residual(), planes, method)
    for method in ("auto", "layerwise", "sketch", "linear"):
        yield f"smooth/{method}", partial(moments, smooth(), line(7), method)
    for method in ("auto", "sketch"):
        yield f"black/{method}", partial(moments, black_box(), line(6), method)
    yield "one/auto", partial(moments, one_relu(), line(6), "auto")


def _with_options() -> Iterator[tuple[str, Call]]:
    network, images = convolutional(), pictures()
    noise = nm.Gaussian(images, std=0.1)
    yield "cnn/two-stage/layer0", partial(moments, network, noise, nm.TwoStage(layer=0))
    yield "cnn/sketch/16", partial(moments, network, noise, nm.Sketch(probes=16, seed=7))
    yield "cnn/layerwise/outputs", partial(moments, network, noise, "layerwise", 2)
    variances = torch.tensor([[0.01], [0.04], [0.09]], dtype=torch.float64).expand(3, 2)
    levels = nm.Gaussian(images.expand(3, 2, 1, 8, 8), nm.Isotropic(variances, 64), event_ndim=3)
    yield "cnn/two-stage/levels", partial(moments, network, levels, "two-stage", [0, 2])
    beside = nm.Gaussian(images + 0.01, std=0.1)
    bank = nm.LinearizationBank.at(network, images)
    yield "cnn/bank", partial(moments, network, beside, nm.TwoStage(bank=bank))


def _linearized() -> Iterator[tuple[str, Call]]:
    network, image = convolutional(), pictures()[0]
    noise = nm.Gaussian(image, std=0.1)

    def matrices() -> Fields:
        found = nm.two_stage(network, image)
        parts = {name: getattr(found, name) for name in ("A", "B", "c1", "c2")}
        return {**parts, **{name: getattr(found, name)(noise) for name in ("mean", "variance", "covariance")}}

    def matrix_free() -> Fields:
        mean, covariance = nm.two_stage_maps(network, image, 0, outputs=[0, 1]).moments(noise)
        return {"mean": mean, "covariance": covariance}

    yield "two_stage", matrices
    yield "two_stage_maps", matrix_free


def _derived() -> Iterator[tuple[str, Call]]:
    network, images = convolutional(), pictures()

    def gradient(method: str) -> Fields:
        moved = images.clone().requires_grad_()
        found = nm.output_moments(network, nm.Gaussian(moved, std=0.1), method)
        total = found.mean.sum()
        if method == "layerwise" and found.covariance is not None:
            total = total + found.covariance.sum()
        return {"grad": torch.autograd.grad(total, moved)[0]}

    def flips() -> Fields:
        found = nm.output_moments(network, nm.Gaussian(images, std=0.3), "layerwise", check=0)
        return {"p": found.class_probabilities(), "f": found.flip_probability(torch.tensor([0, 1]))}

    def sampled() -> Fields:
        found = nm.monte_carlo(network, nm.Gaussian(images, std=0.3), 300, seed=1)
        return {"mean": found.mean, "covariance": found.covariance, "se": found.covariance_standard_error}

    def expected(method: Method) -> Fields:
        return {"scores": nm.ExpectedLogits(network, 0.1, method=method)(images)}

    yield "gradient/layerwise", partial(gradient, "layerwise")
    yield "gradient/sketch", partial(gradient, "sketch")
    yield "flips", flips
    yield "monte_carlo", sampled
    for method in (nm.TwoStage(), nm.Layerwise(), nm.Sketch()):
        yield f"logits/{method.name}", partial(expected, method)


def _kernels() -> Iterator[tuple[str, Call]]:
    def kernels() -> Fields:
        generator = torch.Generator().manual_seed(8)
        factor = torch.randn(40, 12, generator=generator, dtype=torch.float64)
        covariance = factor @ factor.T
        mean = torch.randn(40, generator=generator, dtype=torch.float64) * 3
        std = covariance.diagonal().sqrt()
        correlations = torch.linspace(-0.9, 0.9, 5, dtype=torch.float64)
        return {
            "mean": nm.relu_mean(mean, std),
            "var": nm.relu_variance(mean, std),
            "cov": nm.relu_covariance(mean, covariance),
            "orth": nm.orthant_probability(mean, covariance),
            "cov32": nm.relu_covariance(mean.float(), covariance.float()),
            "series": nm.paper.relu_cross_moment_series(
                mean[:5], mean[5:10], std[:5], std[5:10], correlations, terms=20
            ),
        }

    yield "kernels", kernels


def _attacked() -> Iterator[tuple[str, Call]]:
    attacks = nm.attacks
    formula = attacks.SparseSmooth(iterations=60, polish=0, gamma=0.0, bounds=None, samples=50)
    yield "attack/sparse_smooth", partial(attacked, attacks.SparseSmooth(iterations=60, polish=10, samples=50))
    yield "attack/formula", partial(attacked, formula)
    yield "attack/targeted", partial(attacked, attacks.Targeted(iterations=40, polish=10, samples=50), targeted=1)
    pixels = attacks.PixelSupport(percent=20, iterations=40, polish=10, samples=50)
    yield "attack/pixels", partial(attacked, pixels)
    attack_options = "--images 2 --iterations 40 --polish 10 --samples 40"
    yield "attack report", partial(reported, "attack", attack_options, "attack.json")


def moments(network: nn.Module, noise: nm.Gaussian, method: Method | str, outputs: Any = None) -> Fields:
    """The fields of an answer of `output_moments`, with the optional parts that it has."""
    if method == "auto":  # the formula that fits, as it was when this was recorded, is now for noise with a gradient
        noise = nm.Gaussian(noise.mean.clone().requires_grad_(), noise.covariance, event_ndim=noise.event_ndim)
    found = nm.output_moments(network, noise, method, outputs, check=0)
    always = {name: getattr(found, name) for name in ("mean", "variance", "covariance", "method", "cut")}
    optional = ["distance", "outputs"]
    if found.method == "sampling":
        optional += ["mean_standard_error", "variance_standard_error"]
    return always | {name: getattr(found, name) for name in optional if getattr(found, name) is not None}


def attacked(attack: Callable[..., Any], targeted: int = 0) -> Fields:
    """Attack three of scikit-learn's digits, each towards the label plus `targeted`, or towards any other class."""
    digits = nm.data.load("digits").first(3)
    assert digits.labels is not None
    targets = (digits.labels + targeted) % 10 if targeted else None
    found = attack(nm.zoo.pretrained("digits"), digits.images, digits.labels, targets)
    parts = {name: getattr(found, name) for name in ("mu", "sigma", "margin", "towards")}
    return parts | {"success": found.success.rate}


def reported(command: str, options: str, file: str) -> Fields:
    """The JSON that a report on the digits writes, without where and when it was made."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "netmoments", command, "digits", "digits", *options.split(), "--out", folder]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"netmoments {command} failed: {done.stderr.strip().splitlines()[-1:]}")
        record: dict[str, Any] = json.loads(Path(folder, file).read_text())
    del record["provenance"]
    return record


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A network with weights from this seed, in eval mode; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def convolutional(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network for images (1, 8, 8) with convolutions, a pool, two kinds of ReLU and 5 scores."""
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.LeakyReLU(0.1),
        nn.Flatten(), nn.Linear(54, 16), nn.ReLU(), nn.Linear(16, 5),
    )  # fmt: skip
    return seeded(0, layers).to(dtype)


class Residual(nn.Module):
    """A network for images (2, 6, 6) with batch norm and a ReLU6 with a path around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4 * 36, 4)
        assert self.norm.running_mean is not None
        self.norm.running_mean.uniform_()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = x + nn.functional.relu6(self.second(x))
        scores: Tensor = self.last(x.flatten(1))
        return scores


def residual() -> nn.Module:
    return seeded(1, Residual).double()


def smooth() -> nn.Module:
    """A network for 7 numbers with GELU and tanh."""
    layers = lambda: nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))  # noqa: E731
    return seeded(2, layers).double()


class BlackBox(nn.Module):
    """A network for 6 numbers with a layer norm and a softmax, which have no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.last(torch.relu(self.norm(self.first(x)))), -1)


def black_box() -> nn.Module:
    return seeded(3, BlackBox).double()


def one_relu() -> nn.Module:
    """A network for 6 numbers: affine, ReLU, affine."""
    return seeded(4, lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))).double()


def pictures(shape: tuple[int, ...] = (1, 8, 8), dtype: torch.dtype = torch.float64) -> Tensor:
    """Two random images."""
    return torch.rand(2, *shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def line(size: int) -> nm.Gaussian:
    """Noise about evenly spaced numbers from −1 to 1."""
    return nm.Gaussian(torch.linspace(-1, 1, size, dtype=torch.float64), std=0.3)


def covariances(size: int) -> dict[str, Tensor | Covariance]:
    """A covariance of every structure."""
    generator = torch.Generator().manual_seed(6)
    factor = torch.randn(size, 3, generator=generator, dtype=torch.float64) * 0.05
    diagonal = torch.rand(size, generator=generator, dtype=torch.float64) * 0.01
    return {
        "isotropic": torch.tensor(0.0025, dtype=torch.float64),
        "diagonal": nm.Diagonal(diagonal),
        "dense": nm.Dense(factor @ factor.T + torch.diag(diagonal)),
        "lowrank": nm.LowRank(factor, diagonal),
        "factor": nm.LowRank(factor),
    }


def output_of(call: Call) -> Any:
    """The result of a call as plain numbers and words, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _plain(call())


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().flatten()
        return (flat.double() if value.is_floating_point() else flat).tolist()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Difference:
    """How far the result of a call is from its record."""

    largest: float
    """The largest difference of numbers, relative to the largest value of the field."""
    beyond: tuple[str, ...]
    """Fields that differ by more than rounding, are missing, or are not the same word."""


def difference(name: str, recorded: Any, found: Any) -> Difference:
    """The difference between the recorded and the present result of a call."""
    before, now = dict(_leaves(recorded)), dict(_leaves(found))
    beyond = [f"{place} is {'missing' if place in before else 'new'}" for place in sorted(before.keys() ^ now.keys())]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for place in (place for place in before if place in now):
        old, new = before[place], now[place]
        if _is_number(old) and _is_number(new):
            pairs.setdefault(place.rsplit("[", 1)[0], []).append((old, new))
        elif old != new:
            beyond.append(f"{place}: {old!r} was recorded, now {new!r}")
    largest = 0.0
    for field, both in sorted(pairs.items()):
        scale = max((abs(old) for old, _ in both if math.isfinite(old)), default=0.0)
        apart = max(_apart(old, new) for old, new in both)
        relative = apart / scale if scale else float(apart > 0)
        largest = max(largest, relative)
        if not relative <= allowed(name, field):
            beyond.append(f"{field} differs by {relative:.1e}, allowed {allowed(name, field):.0e}")
    return Difference(largest, tuple(beyond))


def allowed(name: str, field: str) -> float:
    """The difference that counts as rounding in a field of a call, relative to the field's largest value."""
    if name.startswith(ITERATED):
        return ATTACK
    return SINGLE if "32" in f"{name}{field}" else DOUBLE


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and word, with its place."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, f"{place}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{place}[{number}]")
    else:
        yield place, value


def _apart(old: float, new: float) -> float:
    """|old − new|; infinite if one of them is not a number."""
    if old == new or (math.isnan(old) and math.isnan(new)):
        return 0.0
    return math.inf if math.isnan(old - new) else abs(old - new)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare(path: Path) -> int:
    """Print a line for each call and one for all; return how many are not as recorded."""
    recorded, every, differing = json.loads(path.read_text()), calls(), 0
    for name in every | recorded:
        try:
            found = difference(name, recorded[name], output_of(every[name]))
        except Exception as error:  # a call that fails, or is in one of the two only, is one that differs
            found = Difference(float("nan"), (f"{type(error).__name__}: {error}",))
        differing += bool(found.beyond)
        print(f"{name:24} {found.largest:8.1e}  {'; '.join(found.beyond[:3])}".rstrip(), flush=True)
    print(f"{differing} calls differ" if differing else f"all {len(every)} calls are as recorded")
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("record").add_argument("file", type=Path)
    actions.add_parser("compare").add_argument("file", type=Path, nargs="?", default=RECORD)
    chosen = parser.parse_args()
    if chosen.action == "compare":
        return 1 if compare(chosen.file) else 0
    chosen.file.write_text(json.dumps({name: output_of(call) for name, call in calls().items()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

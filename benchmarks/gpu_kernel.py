"""Time the GPU kernels as ratios to a copy of the matrix, and check accuracy in the same run: `make bench-gpu`.

    python -m benchmarks.gpu_kernel                                  # the table
    python -m benchmarks.gpu_kernel --forward                        # without the backward passes
    python -m benchmarks.gpu_kernel --sweep float32:32,4,80,4        # other tiles: side, warps, registers, run
    python -m benchmarks.gpu_kernel --precision ieee                 # float32 products without tensor cores

It needs only a CUDA device, torch, numpy and triton; for LeNet also safetensors, and MNIST if `--data-dir` gives it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacfwd

import netmoments as nm
from netmoments.precision import full_precision, matmul, row_products
from netmoments.relu.covariance import relu_covariance
from netmoments.relu.triton import kernels
from netmoments.relu.triton import launch as fused

UNITS = 8192
OUTPUTS = 10
RANKS = {"weak": 784, "strong": 8}
SIGMA = 0.1
PROMISED = {torch.float32: 5e-7, torch.float64: 1e-14}
FORWARD_LIMIT = {torch.float32: 2, torch.float64: 12}
"""The most that the covariance may cost, in copies of the matrix."""

DIAGONAL_LIMIT = {torch.float32: 0.20}
"""The most that the diagonal of the form may cost, in milliseconds."""

DIGIT = ("00ca0000", "00egge00", "00dgfa10", "00bgg700", "00047g70", "00004g90", "0054cg40", "009gga00")
"""A five from scikit-learn's digits, with pixels from 0 to 16 = g."""


class Layer(NamedTuple):
    """Means and covariance of the pre-activations, and weights of a form."""

    mean: Tensor
    covariance: Tensor
    weights: Tensor

    def to(self, dtype: torch.dtype) -> Layer:
        return Layer(*(x.to(dtype) for x in self))

    def exact(self) -> Tensor:
        """Cov(relu z) by the plain version in float64."""
        return plain(partial(relu_covariance, self.mean.double(), self.covariance.double()))

    def calls(self) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """The calls of the covariance and of the form's diagonal."""
        return partial(relu_covariance, self.mean, self.covariance), partial(form_diagonal, *self)

    def errors(self, exact: Tensor) -> tuple[float, float]:
        """Errors of the covariance relative to the largest variance, of the diagonal relative to its largest entry."""
        covariance, diagonal = (call().double() for call in self.calls())
        wide = ((self.weights.double() @ exact) * self.weights).sum(1)
        largest = self.covariance.diagonal().double().max()
        return float((covariance - exact).abs().max() / largest), float((diagonal - wide).abs().max() / wide.max())


def form_diagonal(mean: Tensor, covariance: Tensor, weights: Tensor) -> Tensor:
    """diag(B K Bᵀ), (outputs,), by the kernel of `pairs_form_diagonal`, which is given the whole covariance here."""
    if not kernels.PRESENT:
        return row_products(matmul(weights, relu_covariance(mean, covariance)), weights)
    layer = fused.layer_of(mean.unsqueeze(0), covariance.diagonal().unsqueeze(0))
    return fused.form_diagonal(layer, fused.Strip(covariance.unsqueeze(0), 0), weights.unsqueeze(0)).squeeze(0)


def random_layer(rank: int) -> Layer:
    """Means of order 1, a covariance of unit variances and correlations of order 1/√rank, and weights."""
    generator = torch.Generator("cuda").manual_seed(rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device="cuda", generator=generator)

    factor = torch.nn.functional.normalize(normal(UNITS, rank), dim=1)
    weights = normal(OUTPUTS, UNITS) / UNITS**0.5
    return Layer(normal(UNITS), factor @ factor.T, weights)


def lenet_layer(image: Tensor) -> Layer:
    """The first units of the second convolution of the paper's LeNet under white noise, linearized at an image.

    They are in units such that the average of the variances is 1; some variances are 0.
    """
    network: Any = nm.zoo.pretrained("lenet").double().to(image.device)

    def pre_activations(x: Tensor) -> Tensor:
        first = network.relu1(network.pool1(network.conv1(x.unsqueeze(0))))
        return network.conv2(first).flatten()[:UNITS]

    with full_precision(), torch.no_grad():
        jacobian = jacfwd(pre_activations)(image).flatten(1)
        scale = jacobian.square().sum(1).mean().sqrt()
        mean = pre_activations(image) / (SIGMA * scale)
        factor = jacobian / scale
        weights = torch.randn(OUTPUTS, UNITS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return Layer(mean, factor @ factor.T, weights.to(image.device) / UNITS**0.5)


def picture(data_dir: str | None) -> Tensor:
    """An image, 1×28×28: MNIST's first test image, or an enlarged digit of scikit-learn's."""
    if data_dir is not None:
        return nm.data.load("mnist", data_dir=data_dir).images[0].double()
    digit = torch.tensor([[int(pixel, 17) / 16 for pixel in row] for row in DIGIT], dtype=torch.float64)
    return torch.nn.functional.interpolate(digit.view(1, 1, 8, 8), size=28, mode="bilinear")[0]


def layers(data_dir: str | None) -> dict[str, Layer]:
    """All layers that are measured, in float64 on the device."""
    made = {name: random_layer(rank) for name, rank in RANKS.items()}
    if find_spec("safetensors"):
        made["lenet"] = lenet_layer(picture(data_dir).cuda())
    else:
        print("without the LeNet: its weights need safetensors")
    return made


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time on the device of one call, launches and waiting for the host included."""
    started = perf_counter()
    while perf_counter() - started < 0.2:  # until the device's clocks are up
        call()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # the host runs ahead, as it does in a network: what is timed is the device
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def plain(call: Callable[[], Any]) -> Any:
    """A call without Triton."""
    present, kernels.PRESENT = kernels.PRESENT, False
    try:
        return call()
    finally:
        kernels.PRESENT = present


def copy_milliseconds(dtype: torch.dtype) -> float:
    source = torch.rand(UNITS, UNITS, dtype=dtype, device="cuda")
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source))


def exponential_milliseconds(dtype: torch.dtype) -> float:
    source = torch.rand(UNITS, UNITS, dtype=dtype, device="cuda")
    return milliseconds(lambda: torch.exp(source, out=source))


def sweep(candidates: list[str], made: dict[str, Layer]) -> None:
    """Times of the covariance, of the form's diagonal and of their kernels, for the tiles given as texts."""
    for dtype in PROMISED:
        mine = [x for x in candidates if x.startswith(f"{str(dtype)[6:]}:")]
        for name, layer in made.items() if mine else ():
            chosen = layer.to(dtype)
            exact = chosen.exact()
            for candidate in mine:
                shape = fused.Shape(*map(int, candidate.split(":")[1].split(",")))
                fused.TILES[dtype] = fused.DIAGONAL_TILES[dtype] = shape
                covariance, diagonal = (milliseconds(call, 8) for call in chosen.calls())
                of_covariance, of_diagonal = chosen.errors(exact)
                print(
                    f"{candidate:20} {name:6}  covariance {covariance:.3f} ms, error {of_covariance:.1e}; "
                    f"diagonal {diagonal:.3f} ms, error {of_diagonal:.1e}; "
                    f"µs: {', '.join(kernel_microseconds(chosen.calls()))}",
                    flush=True,
                )


def kernel_microseconds(calls: tuple[Callable[[], object], ...]) -> list[str]:
    """The average time of each kernel on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls * 3:
            call()
        torch.cuda.synchronize()
    return [f"{x.key[:28]} {x.device_time:.0f}" for x in profile.key_averages() if x.device_time >= 1]


def forward_rows(dtype: torch.dtype, name: str, layer: Layer, copy: float) -> None:
    """The covariance of one layer, and the diagonal of its form."""
    exact = layer.exact()
    of_covariance, of_diagonal = layer.errors(exact)
    covariance, diagonal = layer.calls()
    promised = PROMISED[dtype]
    time = show(dtype, name, "covariance", covariance, copy, f"error {of_covariance:.1e} (promised {promised:.0e})")
    limit = FORWARD_LIMIT[dtype]
    print(f"    at most {limit} copies: {verdict(of_covariance <= promised and time <= limit * copy)}")
    time = show(dtype, name, "diag(B K Bᵀ)", diagonal, copy, f"relative error {of_diagonal:.1e}")
    if dtype in DIAGONAL_LIMIT:
        print(f"    at most {DIAGONAL_LIMIT[dtype]:.2f} ms: {verdict(time <= DIAGONAL_LIMIT[dtype])}")


def verdict(reached: bool) -> str:
    return "reached" if reached else "NOT REACHED"


def backward_row(dtype: torch.dtype, name: str, layer: Layer, copy: float) -> None:
    """The backward pass of one layer's covariance."""
    upstream = torch.randn_like(layer.covariance) / UNITS
    inputs = [layer.mean.clone().requires_grad_(), layer.covariance.clone().requires_grad_()]

    def differentiate() -> object:
        return torch.autograd.grad(relu_covariance(*inputs), inputs, upstream)

    show(dtype, name, "covariance, backward", differentiate, copy)


def show(dtype: torch.dtype, name: str, what: str, call: Callable[[], object], copy: float, remark: str = "") -> float:
    """Print a line with the time in milliseconds."""
    time, slow = milliseconds(call), milliseconds(partial(plain, call), 3)
    print(
        f"{str(dtype)[6:]}  {name:6}  {what:22} {time:8.3f} ms = {time / copy:5.1f} copies, "
        f"plain version {slow / time:5.1f} × as long  {remark}",
        flush=True,
    )
    return time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", nargs="*", default=[], help="tiles to try: dtype:side,warps,registers,run")
    parser.add_argument("--precision", choices=("tf32x3", "ieee"), help="of float32 products in the form's diagonal")
    parser.add_argument("--forward", action="store_true", help="without the backward passes")
    parser.add_argument("--data-dir", help="where MNIST is")
    chosen = parser.parse_args()
    if chosen.precision:
        fused.PRECISION[torch.float32] = chosen.precision
    triton = import_module("triton")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    made = layers(chosen.data_dir)
    if chosen.sweep:
        sweep(chosen.sweep, made)
        return
    for dtype in PROMISED:
        copy, exponential = copy_milliseconds(dtype), exponential_milliseconds(dtype)
        print(f"{str(dtype)[6:]}, p = {UNITS}: copy {copy:.3f} ms, exp {exponential / copy:.1f} copies")
        for name, layer in made.items():
            forward_rows(dtype, name, layer.to(dtype), copy)
            if not chosen.forward:
                backward_row(dtype, name, layer.to(dtype), copy)


if __name__ == "__main__":
    main()

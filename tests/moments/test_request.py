"""What a caller asks for: which outputs, several noisy arguments and constants, which dimensions are one input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.moments.request import Request, joint_noise
from tests.closeness import assert_close
from tests.moments.problems import PROPAGATED, deep, noise
from tests.networks import network, seeded
from tests.sampling.kinds import Recurrent

F64 = torch.float64


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def assert_alike(found: nm.OutputMoments, other: nm.OutputMoments) -> None:
    """Means and covariances within 5 standard errors of both."""
    for name in ("mean", "covariance"):
        off = getattr(found, name) - getattr(other, name)
        error = (getattr(found.error, name) ** 2 + getattr(other.error, name) ** 2).sqrt()
        assert float((off / error).nan_to_num(0.0).abs().max()) < 5, name


# which outputs


def test_a_sketch_of_many_scores_is_of_all():
    net, given = deep(scores=120), noise(2, 3)
    every = nm.output_moments(net, given, "sketch")
    assert every.outputs is None
    assert every.mean.shape == (2, 3, 120)
    best = net(given.mean).topk(5, -1).indices
    some = nm.output_moments(net, given, "sketch", 5, check=0)
    assert torch.equal(some.outputs, best)
    assert_close(some.mean, every.mean.gather(-1, best), atol=1e-12)
    assert_close(some.variance, every.variance.gather(-1, best), atol=1e-12)


EACH = torch.tensor([[0, 3], [1, 2], [4, 0], [2, 2], [3, 1], [0, 4]])


def choices(net: nn.Module, given: nm.Gaussian) -> dict[str, tuple[object, Tensor]]:
    """As they are said, and the indices (2, 3, 2) that they mean."""
    return {
        "a list": ([3, 0], torch.tensor([3, 0]).expand(2, 3, 2)),
        "the largest": (2, net(given.mean).topk(2, -1).indices),
        "each": (EACH, EACH.reshape(2, 3, 2)),
        "from the end": ([-1, 0], torch.tensor([4, 0]).expand(2, 3, 2)),
    }


def chosen_square(matrix: Tensor, rows: Tensor) -> Tensor:
    square = matrix.gather(-2, rows.unsqueeze(-1).expand(2, 3, 2, 5))
    return square.gather(-1, rows.unsqueeze(-2).expand(2, 3, 2, 2))


@pytest.mark.parametrize("method", [*PROPAGATED, "two-stage", "linear", nm.Sampling(200)])
def test_chosen_scores_are_selected_from_all(method):
    net, given = deep(scores=5), noise(2, 3)
    everything = nm.output_moments(net, given, method, check=0)
    assert everything.outputs is None
    for name, (outputs, rows) in choices(net, given).items():
        found = nm.output_moments(net, given, method, outputs, check=0)
        assert torch.equal(found.outputs, rows), name
        assert_close(found.mean, everything.mean.gather(-1, rows), atol=1e-14, what=name)
        assert_close(found.covariance, chosen_square(everything.covariance, rows), atol=1e-13, what=name)


def test_chosen_scores_are_sampled_as_far_as_they_need():
    """Not from the same samples, as others may need fewer: within 5 standard errors of both."""
    net, given = deep(scores=5), noise(2, 3)
    everything = nm.output_moments(net, given, tolerance=0.02)
    for name, (outputs, rows) in choices(net, given).items():
        found = nm.output_moments(net, given, nm.Auto(0.02, seed=1), outputs)
        assert torch.equal(found.outputs, rows), name
        assert bool((found.reached <= 0.02).all())
        error = (found.error.mean**2 + everything.error.mean.gather(-1, rows) ** 2).sqrt()
        assert float(((found.mean - everything.mean.gather(-1, rows)) / error).abs().max()) < 5, name
        error = (found.error.covariance**2 + chosen_square(everything.error.covariance, rows) ** 2).sqrt()
        off = found.covariance - chosen_square(everything.covariance, rows)
        assert float((off / error).abs().max()) < 5, name


# several arguments


class Two(nn.Module):
    """A vector and an image, by way of a layer each, and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 5), nn.Conv2d(1, 2, 2), nn.Linear(13, 3)

    def forward(self, x: Tensor, image: Tensor, *, scale: float = 1.0) -> Tensor:
        both = torch.cat([self.a(x), self.b(image).flatten(1)], 1)
        return scale * self.last(torch.tanh(both))


class Joined(nn.Module):
    """The same of one vector."""

    def __init__(self, two: Two) -> None:
        super().__init__()
        self.two = two

    def forward(self, x: Tensor) -> Tensor:
        return self.two(x[:, :4], x[:, 4:].reshape(-1, 1, 3, 3))


X = nm.Gaussian(normal(2, 4), nm.Diagonal(0.1 * normal(2, 4, seed=2) ** 2))
FACTOR = 0.2 * normal(9, 2, seed=3)
IMAGE = nm.Gaussian(normal(1, 3, 3, seed=4), nm.LowRank(FACTOR, 0.01))
JOINT = nm.Gaussian(
    torch.cat([X.mean, IMAGE.mean.flatten().expand(2, 9)], 1),
    nm.Dense(
        torch.stack([torch.block_diag(d, IMAGE.covariance.dense()) for d in torch.diag_embed(X.covariance.variances())])
    ),
)
"""Both, as one Gaussian; a batch of two vectors with one image."""


@pytest.mark.parametrize("method", ["layerwise", "linear", nm.Auto(0.02), "sketch", nm.Sampling(2000)])
@pytest.mark.filterwarnings("ignore:.*tanh.*smooth")
def test_several_noisy_arguments_are_one_gaussian(method):
    """Formulas give the same to rounding; samples, other ones, and sketches of other probes, within their errors."""
    two = seeded(Two)
    found = nm.output_moments(two, (X, IMAGE), method)
    expected = nm.output_moments(Joined(two).eval(), JOINT, method)
    if method in ("layerwise", "linear"):
        assert_close(found.mean, expected.mean, atol=1e-10)
        assert_close(found.covariance, expected.covariance, atol=1e-10)
    else:
        assert_alike(found, expected)
    named = nm.output_moments(two, {"image": IMAGE, "x": X}, method)
    assert_alike(named, expected)


def test_words_and_numbers_among_the_arguments():
    two = seeded(Two)
    plain = nm.output_moments(two, {"x": X, "image": IMAGE}, tolerance=0.05)
    scaled = nm.output_moments(two, {"x": X, "image": IMAGE, "scale": 2.0}, tolerance=0.05)
    assert_close(scaled.mean, 2 * plain.mean, atol=1e-12)
    assert_close(scaled.variance, 4 * plain.variance, atol=1e-12)


def test_a_constant_tensor_is_repeated_for_each_input():
    """An image that is certain: as noise of variance zero."""
    two = seeded(Two)
    found = nm.output_moments(two, (X, IMAGE.mean), "layerwise", check=0)
    certain = nm.output_moments(two, (X, nm.Gaussian(IMAGE.mean, 0.0)), "layerwise", check=0)
    assert_close(found.mean, certain.mean, atol=1e-12)
    assert_close(found.covariance, certain.covariance, atol=1e-12)
    other = nm.output_moments(two, (X, 2 * IMAGE.mean), "layerwise", check=0)  # the same form, other numbers
    assert float((other.mean - found.mean).abs().max()) > 0.01
    again = nm.output_moments(two, (X, IMAGE.mean), tolerance=0.05)
    assert_close(again.mean / found.mean, torch.ones(2, 3), atol=0.05)
    changed = nm.output_moments(two, (X, 2 * IMAGE.mean), tolerance=0.05)
    assert_close(changed.mean / other.mean, torch.ones(2, 3), atol=0.05)


class Weighted(nn.Module):
    """A matrix that all inputs share."""

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        return torch.tanh(x @ matrix.reshape(4, 3))


class Strict(Weighted):
    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        if matrix.dim() != 2:
            raise ValueError("the matrix is for all")
        return super().forward(x, matrix)


def test_a_constant_that_cannot_be_repeated_is_passed_as_it_is():
    matrix = normal(4, 3, seed=6)
    found = nm.output_moments(Strict().eval(), (X, matrix), tolerance=0.05)
    layer = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh()).double().eval()
    with torch.no_grad():
        layer[0].weight.copy_(matrix.T)
    assert_close(found.mean, nm.output_moments(layer, X, tolerance=0.05).mean, atol=1e-12)


def test_joint_noise_says_where_each_argument_is():
    noise, arguments = joint_noise((X, 3, IMAGE), "test")
    assert noise.mean.shape == (2, 13)
    first, number, last = arguments.structure
    assert (first.start, first.shape, number, last.start, last.shape) == (0, (4,), 3, 4, (1, 3, 3))
    _, named = joint_noise({"image": IMAGE, "x": X}, "test")
    assert list(named.structure) == ["image", "x"]


# which dimensions are one input


READ: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "a sequence": (Recurrent, (6, 3), ()),
    "sequences": (Recurrent, (4, 6, 3), (4,)),
    "a volume": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)),
        (1, 3, 3, 3),
        (),
    ),
    "volumes": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)),
        (2, 1, 3, 3, 3),
        (2,),
    ),
    "a vector": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,), ()),
    "vectors": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (5, 3), (5,)),
    "an image": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)), (1, 3, 3), ()),
}


@pytest.mark.parametrize("case", READ)
def test_the_network_says_which_dimensions_are_one_input(case):
    """The same as if the caller had said so, with one variance for all and with one for each number."""
    make, shape, batch = READ[case]
    net, mean = seeded(make), normal(*shape)
    event = len(shape) - len(batch)
    for covariance in (0.04, 0.1 * mean.abs()):
        found = nm.output_moments(net, nm.Gaussian(mean, covariance), tolerance=0.1)
        assert found.mean.shape == (*batch, 2)
        said = nm.output_moments(net, nm.Gaussian(mean, covariance, event_ndim=event), tolerance=0.1)
        assert_close(found.mean, said.mean, atol=1e-13)
        assert_close(found.variance, said.variance, atol=1e-13)


def test_no_reading_fits():
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))
    wrong = r"output_moments: the network cannot take an input of shape \(3,\)"
    with pytest.raises(ValueError, match=wrong + r".*; the mean of shape \(2, 3\) was read as .*event_ndim="):
        nm.output_moments(net, nm.Gaussian(normal(2, 3), std=0.1))
    with pytest.raises(ValueError, match=wrong) as caught:
        nm.output_moments(net, nm.Gaussian(normal(2, 3), std=0.1, event_ndim=1))
    assert "event_ndim" not in str(caught.value)


def test_what_a_request_is():
    request = Request.read(network("shared"), nm.Gaussian(normal(2, 3, 6), std=0.1, event_ndim=1), [1], None, "test")
    assert request.flat.mean.shape == (6, 6)
    assert request.indices().tolist() == [[1]] * 6
    assert not request.wants_gradient
    assert request.products(100)
    assert not request.products(101)
    asked = Request.read(network("shared"), request.noise, None, None, "test", covariance=True)
    assert asked.products(1000)
    moved = nm.Gaussian(normal(6).requires_grad_(), std=0.1)
    wanting = Request.read(network("shared"), moved, None, None, "test")
    assert wanting.wants_gradient
    with torch.no_grad():
        assert not Request.read(network("shared"), moved, None, None, "test").wants_gradient


# bad input


TWO = seeded(Two)
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a tensor": (
        lambda: nm.output_moments(TWO, X.mean),
        TypeError,
        r"noise must be a netmoments\.Gaussian, or a tuple or dictionary .* with Gaussians among them, got a float64",
    ),
    "no noise": (
        lambda: nm.output_moments(TWO, {"x": X.mean, "image": IMAGE.mean}),
        ValueError,
        r"none of the network's arguments is a netmoments\.Gaussian, got x, image",
    ),
    "no arguments": (lambda: nm.output_moments(TWO, ()), ValueError, r"none of the network's arguments is"),
    "two dtypes": (
        lambda: nm.output_moments(TWO, (X, IMAGE.to(torch.float32))),
        TypeError,
        r"must have one dtype and device, got torch\.float64 on cpu and torch\.float32 on cpu \(1\); convert one",
    ),
    "two batches": (
        lambda: nm.output_moments(TWO, {"x": X, "image": nm.Gaussian(normal(3, 1, 3, 3), std=0.1)}),
        ValueError,
        r"must have the same batch shape, got x \(2,\), image \(3,\)",
    ),
    "a missing argument": (lambda: nm.output_moments(TWO, (X,)), ValueError, r"cannot take an input .*missing 1"),
    "an unknown argument": (
        lambda: nm.output_moments(TWO, {"x": X, "picture": IMAGE}),
        ValueError,
        r"cannot take an input of shape \(13,\): .*unexpected keyword argument 'picture'$",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_noise(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_an_affine_relu_affine_has_one_argument():
    gates = nm.AffineReluAffine(torch.ones(4, 4), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))
    with pytest.raises(TypeError, match=r"noise must be a netmoments\.Gaussian, got"):
        nm.output_moments(gates, (nm.Gaussian(torch.zeros(4), std=0.1),))


@pytest.mark.filterwarnings("ignore:.*([Qq]uantiz|[Ss]parse|TypedStorage)")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight.detach().to_sparse())), "sparse_coo"),
        (lambda net: net.to("meta"), "no values, as it is on the meta device"),
        (lambda net: net.register_module("0", quantized(net)), "0 is quantized"),
    ],
    ids=["sparse", "meta", "quantized"],
)
def test_weights_that_are_no_plain_tensors_any_more(change, words):
    """A network that was looked at before is refused as clearly as one that is new."""
    net, noise = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval(), nm.Gaussian(torch.zeros(3), std=0.1)
    nm.output_moments(net, noise, tolerance=0.1)
    change(net)
    for method in ("auto", "layerwise", "sampling"):
        with pytest.raises(TypeError, match=words):
            nm.output_moments(net, noise, method)


def quantized(net: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)[0]

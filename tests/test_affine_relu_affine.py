"""(Affine, ReLU, Affine): against the dense kernel, Monte Carlo and finite differences, in every arrangement."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import netmoments as nm
from tests.closeness import assert_close, assert_within_standard_errors
from tests.fuzz.oracle import mean_and_variance
from tests.gaussians import KINDS, SIZE, structures
from tests.networks import random_network


def dense_covariance(network: nm.AffineReluAffine, noise: nm.Gaussian) -> Tensor:
    """B K Bᵀ with everything stored: the dense twin."""
    mean = (network.A @ noise.flat_mean.unsqueeze(-1)).squeeze(-1) + network.c1
    pushed = network.A @ noise.covariance.dense() @ network.A.mT
    return network.B @ nm.relu_covariance(mean, 0.5 * (pushed + pushed.mT)) @ network.B.mT


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_dense_twin(kind, batch):
    noise = structures(batch)[kind]
    network = random_network(SIZE, 11, 3, seed=1)
    expected = dense_covariance(network, noise).expand(*batch, 3, 3)
    assert_close(network.covariance(noise), expected, atol=2e-15 * max(1, float(expected.max())) * 11)
    assert_close(
        network.variance(noise), expected.diagonal(dim1=-2, dim2=-1), atol=2e-14 * max(1, float(expected.max()))
    )
    assert network.mean(noise).shape == (*batch, 3)


def test_one_network_an_image():
    noise = structures((4,))["dense"]
    networks = [random_network(SIZE, 8, 2, seed=i) for i in range(4)]
    together = nm.AffineReluAffine(
        *(torch.stack([getattr(n, part) for n in networks]) for part in ("A", "c1", "B", "c2"))
    )
    for i, network in enumerate(networks):
        alone = nm.Gaussian(noise.mean[i], nm.Dense(noise.covariance.dense()[i]))
        assert_close(together.mean(noise)[i], network.mean(alone), atol=1e-15)
        assert_close(together.variance(noise)[i], network.variance(alone), atol=1e-14)
        assert_close(together.covariance(noise)[i], network.covariance(alone), atol=1e-14)
    same_noise = nm.Gaussian(noise.mean[0], std=0.3)
    assert_close(together.variance(same_noise)[2], networks[2].variance(same_noise), atol=1e-14)
    half_batched = nm.AffineReluAffine(together.A, networks[0].c1, networks[0].B, together.c2)
    expected = nm.AffineReluAffine(networks[3].A, networks[0].c1, networks[0].B, networks[3].c2).variance(same_noise)
    assert_close(half_batched.variance(same_noise)[3], expected, atol=1e-14)


def test_images_are_flattened():
    network = random_network(12, 5, 2, seed=2)
    image = torch.randn(3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flat = network.variance(nm.Gaussian(image.flatten(), std=0.1))
    assert_close(network.variance(nm.Gaussian(image, std=0.1)), flat, atol=0)
    assert network.mean(nm.Gaussian(image.expand(7, 3, 2, 2), std=0.1)).shape == (7, 2)


@pytest.mark.parametrize("kind", ["isotropic", "low rank plus diagonal", "dense and singular"])
def test_seeded_monte_carlo(kind):
    noise = structures((2,))[kind]
    network = random_network(SIZE, 40, 3, seed=3)
    sampled = nm.monte_carlo(network, noise, samples=300_000, seed=5)
    assert_within_standard_errors(sampled.mean, network.mean(noise), sampled.mean_standard_error)
    assert_within_standard_errors(sampled.variance, network.variance(noise), sampled.variance_standard_error)
    assert_within_standard_errors(sampled.covariance, network.covariance(noise), sampled.covariance_standard_error)


def parameters(batch: tuple[int, ...] = ()) -> list[Tensor]:
    network = random_network(4, 7, 2, seed=4)
    generator = torch.Generator().manual_seed(2)
    extra = [torch.randn(*batch, 4, dtype=torch.float64, generator=generator)]
    return [x.clone().requires_grad_() for x in (network.A, network.c1, network.B, network.c2, *extra)]


@pytest.mark.parametrize("batch", [(), (3,)])
def test_gradients_to_everything(batch):
    generator = torch.Generator().manual_seed(3)
    factor = torch.randn(4, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    diagonal = torch.rand(4, dtype=torch.float64, generator=generator, requires_grad=True)

    def covariance(A, c1, B, c2, mean, factor, diagonal):
        return nm.AffineReluAffine(A, c1, B, c2).covariance(nm.Gaussian(mean, nm.LowRank(factor, diagonal)))

    def mean_and_variance(A, c1, B, c2, mean, factor):
        noise = nm.Gaussian(mean, nm.Dense(factor @ factor.mT))
        network = nm.AffineReluAffine(A, c1, B, c2)
        return network.mean(noise), network.variance(noise)

    assert gradcheck(covariance, (*parameters(batch), factor, diagonal), atol=1e-7)
    assert gradcheck(mean_and_variance, (*parameters(batch), factor), atol=1e-7)


def test_gradient_to_an_isotropic_variance_that_is_zero():
    """At zero noise dVar/dσ² is the squared norm of the slope: finite and right, though σ itself has none."""
    A, c1, B, c2, mean = (x.detach() for x in parameters())
    network = nm.AffineReluAffine(A, c1, B, c2)
    variance = torch.zeros((), dtype=torch.float64, requires_grad=True)
    output = network.variance(nm.Gaussian(mean, variance))
    slope = torch.func.jacrev(network)(mean)
    for i in range(2):
        (gradient,) = torch.autograd.grad(output[i], variance, retain_graph=True)
        assert_close(gradient, slope[i].square().sum(), rtol=1e-14)
    (by_mean,) = torch.autograd.grad(network.mean(nm.Gaussian(mean, variance)).sum(), variance)
    assert by_mean.item() == 0


def test_unused_units_are_skipped_but_not_for_the_gradient_in_b():
    A, c1, B, c2, mean = (x.detach() for x in parameters())
    B[:, [1, 4]] = 0
    noise = nm.Gaussian(mean, std=0.4)
    live = [0, 2, 3, 5, 6]
    pruned = nm.AffineReluAffine(A[live], c1[live], B[:, live], c2)
    assert_close(nm.AffineReluAffine(A, c1, B, c2).variance(noise), pruned.variance(noise), atol=1e-15)
    variance = lambda B: nm.AffineReluAffine(A, c1, B, c2).variance(noise)  # noqa: E731
    assert gradcheck(variance, (B.clone().requires_grad_(),), atol=1e-7)
    expected = torch.autograd.functional.jacobian(lambda B: variance(B).sum(), B)
    assert expected[:, 1].abs().max() > 1e-3
    summed = torch.func.grad(lambda many: torch.func.vmap(variance)(many).sum())(torch.stack([B, B]))
    assert_close(summed[1], expected, atol=1e-14)


def test_functional_transforms():
    A, c1, B, c2, mean = (x.detach() for x in parameters((3,)))

    def variance(A: Tensor, mean: Tensor) -> Tensor:
        return nm.AffineReluAffine(A, c1, B, c2).variance(nm.Gaussian(mean, std=0.5))

    assert_close(torch.func.vmap(variance, in_dims=(None, 0))(A, mean), variance(A, mean), atol=1e-15)
    jacobian = torch.func.jacrev(variance, argnums=(0, 1))(A, mean[0])
    expected = torch.autograd.functional.jacobian(variance, (A, mean[0]))
    assert_close(jacobian[0], expected[0], atol=1e-14)
    assert_close(jacobian[1], expected[1], atol=1e-14)
    each = torch.func.vmap(torch.func.jacrev(variance, argnums=1), in_dims=(None, 0))(A, mean)
    assert_close(each[0], expected[1], atol=1e-14)


def test_a_budget_that_is_none_is_refused():
    """Whatever the size of the network: one of few units has no use for it."""
    network, noise = random_network(SIZE, 3, 2, seed=1), structures(())["isotropic"]
    for asked in (network.variance, network.covariance):
        with pytest.raises(ValueError, match="memory_budget must be a number of bytes"):
            asked(noise, memory_budget=1000)


@pytest.mark.parametrize("memory_budget", [2**16, 2**22])
def test_the_memory_budget_changes_nothing(memory_budget):
    network = random_network(20, 300, 4, seed=6)
    A = network.A.clone().requires_grad_()
    noise = nm.Gaussian(torch.zeros(5, 20, dtype=torch.float64), std=0.3)
    varied = nm.AffineReluAffine(A, network.c1, network.B, network.c2)
    reference = varied.variance(noise)
    value = varied.variance(noise, memory_budget=memory_budget)
    assert_close(value, reference, rtol=1e-13)
    (gradient,) = torch.autograd.grad(value.sum(), A)
    (expected,) = torch.autograd.grad(reference.sum(), A)
    assert_close(gradient, expected, atol=1e-13)


def test_small_noise_in_float32():
    """Means of order 1, noise 0.01, 1024 units: E[g²] − E[g]² would leave nothing of it in float32."""
    generator = torch.Generator().manual_seed(7)
    network = random_network(100, 1024, 10, seed=8)
    network = nm.AffineReluAffine(
        network.A, torch.randn(1024, dtype=torch.float64, generator=generator), network.B, network.c2
    )
    noise = nm.Gaussian(torch.randn(100, dtype=torch.float64, generator=generator), std=0.01)
    single, single_noise = network.to(torch.float32), noise.to(torch.float32)
    exact = single.to(torch.float64).variance(single_noise.to(torch.float64))
    assert_close(single.variance(single_noise), exact, rtol=1e-5)
    series = nm.paper.variance_series(single, single_noise, terms=5).double()
    assert float((series / exact - 1).abs().max()) > 1e-3  # what the paper's way of writing it costs


def test_batches_of_one_and_of_shared_factors_agree_in_float32():
    network = random_network(30, 64, 5, seed=9, dtype=torch.float32)
    noise = nm.Gaussian(torch.randn(20, 30, generator=torch.Generator().manual_seed(0)), std=0.2)
    together = network.variance(noise)
    for i in (0, 7, 19):
        assert_close(network.variance(nm.Gaussian(noise.mean[i], std=0.2)), together[i].double(), rtol=1e-5)


@pytest.mark.parametrize("per_image_network", [False, True])
@pytest.mark.parametrize("kind", ["isotropic", "diagonal", "low rank", "low rank plus diagonal", "dense"])
def test_gradients_with_noise_of_each_image(kind, per_image_network):
    """Shared or per-image network, per-image noise of every structure: all gradients."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    lead = (2,) if per_image_network else ()
    weights = (normal(*lead, 5, 3), normal(*lead, 5), normal(*lead, 2, 5), normal(*lead, 2))
    values = {
        "isotropic": (normal(2, 1),),
        "diagonal": (normal(2, 3),),
        "low rank": (normal(2, 3, 2),),
        "low rank plus diagonal": (normal(2, 3, 1), normal(2, 3)),
        "dense": (normal(2, 3, 4),),
    }[kind]

    def covariance(values: tuple[Tensor, ...]) -> object:
        match kind:
            case "isotropic" | "diagonal":
                return values[0].square()
            case "low rank":
                return nm.LowRank(values[0])
            case "low rank plus diagonal":
                return nm.LowRank(values[0], values[1].square())
            case _:
                return nm.Dense(values[0] @ values[0].mT)

    def moments(A, c1, B, c2, mean, *values):
        noise = nm.Gaussian(mean, covariance(values))
        network = nm.AffineReluAffine(A, c1, B, c2)
        return network.mean(noise), network.variance(noise), network.covariance(noise)

    assert gradcheck(moments, (*weights, normal(2, 3), *values), atol=1e-7)


def test_variance_is_the_diagonal_of_the_covariance_and_never_negative():
    """Equal units whose weights cancel: the exact variance is 0, and rounding must not make it less."""
    for dtype in (torch.float32, torch.float64):
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            B = torch.randn(3, 6, dtype=dtype, generator=generator)
            B -= B.mean(1, keepdim=True)
            A = torch.randn(1, 4, dtype=dtype, generator=generator).expand(6, 4)
            network = nm.AffineReluAffine(A, torch.zeros(6, dtype=dtype), B, torch.zeros(3, dtype=dtype))
            noise = nm.Gaussian(torch.zeros(4, dtype=dtype), std=1.0)
            covariance = network.covariance(noise)
            assert (covariance.diagonal() >= 0).all()
            assert (network.variance(noise) >= 0).all()
            assert torch.equal(covariance, covariance.mT)


@pytest.mark.parametrize(("dtype", "h"), [(torch.float32, -6.1), (torch.float64, -8.6), (torch.float64, -20.0)])
def test_a_dead_unit_keeps_its_variance(dtype, h):
    """Beyond the active set the diagonal is still the unit's own variance, to relative accuracy."""
    one, mean = torch.ones(1, 1, dtype=dtype), torch.tensor([h], dtype=dtype)
    network = nm.AffineReluAffine(one, torch.zeros(1, dtype=dtype), one, torch.zeros(1, dtype=dtype))
    noise = nm.Gaussian(mean, std=1.0)
    expected = nm.relu_variance(mean, torch.ones(1, dtype=dtype)).double()
    assert_close(network.variance(noise), expected, rtol=1e-5 if dtype == torch.float32 else 1e-13)
    assert_close(network.covariance(noise).flatten(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("scale", [1e-18, 1e-20, 0.0])
def test_gradients_are_finite_for_nearly_dead_weights(scale):
    A = torch.eye(2)
    A[1] *= scale
    A.requires_grad_()
    variance = torch.tensor(1.0, requires_grad=True)
    network = nm.AffineReluAffine(A, torch.tensor([0.0, 1000.0]), torch.ones(1, 2), torch.zeros(1))
    for output in (network.variance, network.covariance, network.mean):
        gradients = torch.autograd.grad(output(nm.Gaussian(torch.zeros(2), variance)).sum(), (A, variance))
        assert all(torch.isfinite(g).all() for g in gradients)


def test_only_c2_batched_and_broadcast_batches():
    A, c1, B, c2, mean = (x.detach() for x in parameters())
    network = nm.AffineReluAffine(A, c1, B, c2.expand(5, 2))
    noise = nm.Gaussian(mean, std=0.3)
    assert network.mean(noise).shape == (5, 2)
    assert network.variance(noise).shape == (5, 2)
    assert network.covariance(noise).shape == (5, 2, 2)
    wide = nm.AffineReluAffine(A.expand(4, 1, 7, 4), c1, B, c2)
    assert wide.covariance(nm.Gaussian(mean.expand(3, 4), std=0.3)).shape == (4, 3, 2, 2)


def test_calling_the_network():
    A, c1, B, c2, mean = (x.detach() for x in parameters())
    network = nm.AffineReluAffine(A, c1, B, c2)
    expected = B @ torch.relu(A @ mean + c1) + c2
    assert_close(network(mean), expected, atol=1e-14)
    images = mean.reshape(1, 2, 2).expand(6, 1, 2, 2)
    assert network(images).shape == (6, 2)
    assert_close(network(images)[3], expected, atol=1e-14)
    several = nm.AffineReluAffine(A.expand(3, 7, 4), c1, B, c2)
    assert several(mean.expand(5, 2, 3, 4)).shape == (5, 2, 3, 2)
    assert_close(several(mean.expand(5, 2, 3, 4))[4, 1, 2], expected, atol=1e-14)


def test_forward_mode_is_refused_in_words():
    A, c1, B, c2, mean = (x.detach() for x in parameters())
    network = nm.AffineReluAffine(A, c1, B, c2)
    for output in (network.variance, network.covariance):
        with pytest.raises(RuntimeError, match="use reverse mode"):
            torch.func.jacfwd(lambda m, output=output: output(nm.Gaussian(m, std=0.3)))(mean)


def test_autocast_changes_nothing():
    network, noise = random_network(20, 60, 3, seed=1, dtype=torch.float32), nm.Gaussian(torch.ones(20), std=0.5)
    expected = network.variance(noise)
    mean = torch.ones(20, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(network.variance(noise), expected)
        (gradient,) = torch.autograd.grad(network.variance(nm.Gaussian(mean, std=0.5)).sum(), mean)
    (apart,) = torch.autograd.grad(network.variance(nm.Gaussian(mean, std=0.5)).sum(), mean)
    assert_close(gradient, apart.double(), rtol=1e-5)


@pytest.mark.parametrize(("mean", "variance"), [(1e3, 1e-36), (1e30, 1e-20), (1.0, 1e-39), (0.0, 1e-36)])
def test_gradient_in_a_vanishing_noise_level(mean, variance):
    """Two open units without noise to speak of: dVar/dσ² = 2 (or, at mean 0, what two independent ReLUs have)."""
    level = torch.tensor(variance, requires_grad=True)
    network = nm.AffineReluAffine(torch.eye(2), torch.zeros(2), torch.ones(1, 2), torch.zeros(1))
    (gradient,) = torch.autograd.grad(network.variance(nm.Gaussian(torch.full((2,), mean), level)).sum(), level)
    assert gradient.item() == pytest.approx(2.0 if mean else 1 - 1 / torch.pi, rel=1e-5)


def test_large_weights_do_not_overflow():
    A = 1e-20 * torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    network = nm.AffineReluAffine(A, torch.zeros(2), torch.full((1, 2), 1e20), torch.zeros(1))
    noise = nm.Gaussian(torch.zeros(2), torch.full((2,), 1e5))
    assert_close(network.variance(noise), network.covariance(noise)[0].double(), rtol=1e-5)


def test_inference_mode_leaves_nothing_behind():
    network, noise = random_network(20, 30, 3, seed=1), nm.Gaussian(torch.zeros(20, dtype=torch.float64), std=0.5)
    expected = network.variance(noise)
    from netmoments.relu import bivariate as scratch

    scratch._kept_scratch.__dict__.clear()
    with torch.inference_mode():
        assert_close(network.variance(noise).clone(), expected, rtol=1e-13)
    assert_close(network.variance(noise), expected, rtol=1e-13)


def test_noise_levels_as_a_batch():
    """Many noise levels for many images at once, zero among them: as one at a time, values and gradients."""
    network = random_network(6, 40, 3, seed=12)
    images = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    levels = torch.tensor([0.0, 1e-3, 0.3, 2.0, 1e6], dtype=torch.float64, requires_grad=True)
    mean = images.expand(5, 4, 6).clone().requires_grad_()
    together = nm.Gaussian(mean, std=levels[:, None, None].expand(5, 4, 1), event_ndim=1)
    variance, covariance = network.variance(together), network.covariance(together)
    by_level, by_mean = torch.autograd.grad(variance.sum(), (levels, mean))
    for i in range(5):
        level, point = levels[i].detach().requires_grad_(), images.clone().requires_grad_()
        alone = nm.Gaussian(point, nm.Diagonal((level**2).expand(6)))
        expected = network.variance(alone)
        one_level, one_mean = torch.autograd.grad(expected.sum(), (level, point))
        assert_close(variance[i], expected, rtol=1e-12)
        assert_close(covariance[i], network.covariance(alone), rtol=1e-10, atol=1e-12 * float(expected.max().detach()))
        assert_close(by_level[i], one_level, rtol=1e-10)
        assert_close(by_mean[i], one_mean, rtol=1e-9, atol=1e-12 * float(expected.max().detach()))


F32 = torch.zeros(3)
NETWORK = nm.AffineReluAffine(torch.ones(4, 3), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))


def network(A=(4, 3), c1=(4,), B=(2, 4), c2=(2,)) -> nm.AffineReluAffine:
    parts = (A, c1, B, c2)
    return nm.AffineReluAffine(*(x if isinstance(x, torch.Tensor) else torch.ones(x) for x in parts))


BAD = {
    "A is a vector": (lambda: network(A=(4,)), ValueError, r"A must have shape \(\.\.\., p, n\)"),
    "no rows": (lambda: network(A=(0, 3), c1=(0,), B=(2, 0)), ValueError, "p, n ≥ 1"),
    "c1": (lambda: network(c1=(3,)), ValueError, r"c1 must have shape \(\.\.\., 4\)"),
    "B and A": (lambda: network(B=(2, 5)), ValueError, r"B must have shape \(\.\.\., d, 4\).*A has shape \(4, 3\)"),
    "c2": (lambda: network(c2=(3,)), ValueError, r"c2 must have shape \(\.\.\., 2\)"),
    "batches": (lambda: network(A=(5, 4, 3), B=(6, 2, 4)), ValueError, r"A \(5,\).*B \(6,\)"),
    "weights' dtype": (lambda: network(B=torch.ones(2, 4).double()), TypeError, "A and B must have one dtype"),
    "integer weights": (
        lambda: network(A=torch.ones(4, 3, dtype=torch.int64)),
        TypeError,
        "A must be float32 or float64",
    ),
    "nan weights": (
        lambda: network(B=torch.full((2, 4), math.nan)),
        ValueError,
        "AffineReluAffine: B must be finite, got 8 NaN",
    ),
    "infinite offset": (lambda: network(c2=torch.full((2,), math.inf)), ValueError, "c2 must be finite"),
    "noise is a tensor": (lambda: NETWORK.mean(F32), TypeError, "noise must be a netmoments.Gaussian"),
    "noise size": (
        lambda: NETWORK.mean(nm.Gaussian(torch.zeros(5), std=1.0)),
        ValueError,
        r"A must have shape \(\.\.\., p, 5\).*got .*\(4, 3\)",
    ),
    "image noise size": (
        lambda: NETWORK.mean(nm.Gaussian(torch.zeros(1, 2, 2), std=1.0)),
        ValueError,
        r"event shape \(1, 2, 2\)",
    ),
    "noise dtype": (
        lambda: NETWORK.variance(nm.Gaussian(F32.double(), std=1.0)),
        TypeError,
        r"noise\.to\(torch\.float32\)",
    ),
    "noise batch": (
        lambda: network(A=(5, 4, 3)).covariance(nm.Gaussian(torch.zeros(2, 3), std=1.0)),
        ValueError,
        "broadcast",
    ),
    "calling with other sizes": (lambda: NETWORK(torch.ones(5)), ValueError, r"x must have shape \(\.\.\., 3\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()


# a path around the ReLU


def with_path(network: nm.AffineReluAffine, seed: int = 8) -> nm.AffineReluAffine:
    shape = (*network.batch_shape, network.B.shape[-2], network.A.shape[-1])
    D = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return nm.AffineReluAffine(network.A, network.c1, network.B, network.c2, D)


def augmented(g: nm.AffineReluAffine, shift: float = 60.0) -> nm.AffineReluAffine:
    """The same without a path around: x = relu(x + shift) − shift where x + shift is never negative."""
    assert g.D is not None
    eye, n = torch.eye(g.A.shape[-1], dtype=torch.float64), g.A.shape[-1]
    return nm.AffineReluAffine(
        torch.cat([g.A, eye]),
        torch.cat([g.c1, torch.full((n,), shift, dtype=torch.float64)]),
        torch.cat([g.B, g.D], 1),
        g.c2 - shift * g.D.sum(1),
    )


def dense_with_path(g: nm.AffineReluAffine, noise: nm.Gaussian) -> Tensor:
    """B K Bᵀ + B diag(Φ) A Σ Dᵀ + its transpose + D Σ Dᵀ, as Cov(x, relu(z)) = Cov(x, z)Φ; Φ(0) = ½ for variance 0."""
    assert g.D is not None
    covariance = noise.covariance.dense()
    pushed = g.A @ covariance @ g.A.mT
    mean = (g.A @ noise.flat_mean.unsqueeze(-1)).squeeze(-1) + g.c1
    s = pushed.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300).sqrt()
    cross = g.B @ (torch.special.ndtr(mean / s).unsqueeze(-1) * (g.A @ covariance)) @ g.D.mT
    return dense_covariance(g, noise) + cross + cross.mT + g.D @ covariance @ g.D.mT


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_path_around_against_the_dense_formula_and_an_augmented_network(kind, batch):
    """Rounding: the augmented network carries means of 60 where the others have 1, so 1e-14·60 a term."""
    noise = structures(batch)[kind]
    g = with_path(random_network(SIZE, 11, 3, seed=1))
    twin = augmented(g)
    expected = dense_with_path(g, noise).expand(*batch, 3, 3)
    size = max(1.0, float(expected.abs().max()))
    assert_close(g.covariance(noise), expected, atol=1e-13 * size)
    assert_close(g.variance(noise), expected.diagonal(dim1=-2, dim2=-1), atol=1e-13 * size)
    assert_close(g.covariance(noise), twin.covariance(noise), atol=1e-12 * size)
    assert_close(g.mean(noise), twin.mean(noise), atol=1e-11)
    x = noise.sample(4, generator=torch.Generator().manual_seed(1))
    assert_close(g(x), twin(x), atol=1e-11)


def test_gradients_in_d():
    noise = structures()["dense"]
    g = with_path(random_network(SIZE, 5, 2, seed=2))
    assert g.D is not None

    def moments(D: Tensor) -> tuple[Tensor, ...]:
        network = nm.AffineReluAffine(g.A, g.c1, g.B, g.c2, D)
        return network.mean(noise), network.variance(noise), network.covariance(noise)

    assert gradcheck(moments, (g.D.clone().requires_grad_(),))


def test_d_goes_along():
    """Conversion, batches, choices of outputs and of entries; float32."""
    g = with_path(random_network(SIZE, 5, 3, seed=2))
    assert g.D is not None
    batch = nm.AffineReluAffine(g.A, g.c1, g.B, g.c2, g.D.expand(4, -1, -1))
    assert batch.batch_shape == (4,)
    noise = nm.Gaussian(torch.zeros(SIZE, dtype=torch.float64), std=0.5)
    assert_close(batch.variance(noise), g.variance(noise).expand(4, -1), atol=1e-14)
    assert_close(g.outputs(torch.tensor([2, 0])).covariance(noise), g.covariance(noise)[[2, 0]][:, [2, 0]], atol=1e-15)
    assert_close(g.outputs(torch.tensor([[2], [0]])).mean(noise), g.mean(noise)[[2, 0]].unsqueeze(1), atol=1e-15)
    single = g.to(torch.float32)
    assert single.D is not None
    assert single.D.dtype == torch.float32
    assert_close(single.variance(noise.to(torch.float32)), g.variance(noise), rtol=1e-5)


BAD_D = {
    "transposed": (lambda: ones_with(torch.ones(3, 2)), ValueError, r"D must have shape \(\.\.\., 2, 3\), from inputs"),
    "a vector": (lambda: ones_with(torch.ones(3)), ValueError, r"D must have shape"),
    "another dtype": (lambda: ones_with(torch.ones(2, 3).double()), TypeError, r"A and D must have one dtype"),
    "a list": (lambda: ones_with([[1.0]]), TypeError, r"D must be a torch tensor, got a list"),
    "not finite": (lambda: ones_with(torch.full((2, 3), torch.inf)), ValueError, r"D must be finite, got 6"),
    "another batch": (
        lambda: nm.AffineReluAffine(
            torch.ones(5, 4, 3), torch.ones(4), torch.ones(2, 4), torch.ones(2), torch.ones(7, 2, 3)
        ),
        ValueError,
        r"shapes must broadcast, got A \(5,\), .*D \(7,\)",
    ),
}


def ones_with(D) -> nm.AffineReluAffine:
    return nm.AffineReluAffine(torch.ones(4, 3), torch.ones(4), torch.ones(2, 4), torch.ones(2), D)


@pytest.mark.parametrize("case", BAD_D)
def test_bad_paths_around(case):
    call, error, message = BAD_D[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_output_of_dead_units_has_the_variance_it_has(dtype):
    """A hundred copies of one unit at h = −7: 10⁴ times its variance, though no pair of them matters in units of s²."""
    network = nm.AffineReluAffine(
        torch.ones(100, 1, dtype=dtype),
        torch.full((100,), -7.0, dtype=dtype),
        torch.ones(1, 100, dtype=dtype),
        torch.zeros(1, dtype=dtype),
    )
    noise = nm.Gaussian(torch.zeros(1, dtype=dtype), std=1.0)
    exact = 1e4 * float(mean_and_variance(-7.0)[1])
    rtol = 1e-6 if dtype == torch.float32 else 1e-12
    assert_close(network.variance(noise), [exact], rtol=rtol)
    assert_close(network.covariance(noise), [[exact]], rtol=rtol)
    assert_close(network.moments(noise.mean, noise.covariance)[1], [[exact]], rtol=rtol)
    A, B, c2 = network.A, network.B, network.c2
    batched = torch.func.vmap(lambda c1: nm.AffineReluAffine.trusted(A, c1, B, c2).variance(noise))
    assert_close(batched(network.c1.expand(2, -1)), [[exact]] * 2, rtol=2e-5 if dtype == torch.float32 else rtol)

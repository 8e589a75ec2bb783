"""Sparse and smooth noise on the embedded digits network: as many samples fooled as was asked, at least cost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.attacks.box import Targeted
from netmoments.attacks.evaluation import fooled_margin
from netmoments.attacks.sparse_smooth import TURNS, SparseSmooth
from tests.attacks.problems import GREY, QUICK


def test_as_many_samples_are_fooled_as_was_asked(digits, confident):
    """400 samples set it and 400 judge it: five standard errors of the difference are 0.077."""
    network, _ = digits
    assert len(confident) == 12
    assert bool(confident.feasible.all())
    assert float((confident.success.rate - 0.95).abs().max()) < 0.077
    assert float((confident.success.rate - 0.95).abs().mean()) < 0.03
    fresh = confident.samples(2000, seed=99)
    scores = network(fresh.flatten(0, 1)).unflatten(0, (2000, 12))
    seen = (scores.argmax(-1) != confident.labels).double().mean(0)
    assert float((seen - 0.95).abs().max()) < 5 * (0.05 * 0.95 * (1 / 400 + 1 / 2000)) ** 0.5
    margin = fooled_margin(scores.mean(0), confident.labels, None)
    torch.testing.assert_close(margin, confident.network_margin, rtol=0.2, atol=0.05)


def test_it_keeps_the_bounds_and_is_sparse(confident):
    centre = confident.images + confident.mu
    assert float(centre.min()) >= -1e-7
    assert float(centre.max()) <= 1 + 1e-7
    assert float((confident.mu == 0).double().mean()) > 0.5
    assert torch.equal(confident.l0, (confident.mu.abs() > 1e-3 / 255).flatten(1).sum(1))


def test_a_margin_of_zero_fools_about_half(digits):
    network, images = digits
    result = SparseSmooth(gamma=0.0, samples=400)(network, images.images, images.labels)
    assert 0.35 < float(result.success.rate.mean()) < 0.65
    assert bool(result.fooled.all())


def test_by_the_formula_alone_it_is_the_papers(digits):
    """Without steps on the network the margin of the formula is −γ at the solution, to within the scaling."""
    network, images = digits
    attack = SparseSmooth(gamma=0.5, polish=0, bounds=None, iterations=400)
    result = attack(network, images.images, images.labels)
    assert bool(result.feasible.all())
    torch.testing.assert_close(result.margin, torch.full((12,), -0.5), atol=1e-3, rtol=0)
    assert float(result.gap.quantile(0.9)) < 0.02  # where the margin bends at the solution there is no certificate
    fixed = nm.ExpectedLogits(network, GREY, at=images.images)
    scores = fixed(images.images, result.mu)
    own = scores.gather(1, images.labels[:, None])
    rival = scores.gather(1, result.towards[:, None])
    torch.testing.assert_close((own - rival).flatten(), result.margin, atol=1e-4, rtol=1e-4)
    assert result.success_clipped is None
    assert bool((result.polished == 0).all())


def test_confidence_by_the_formula_alone_needs_a_larger_margin(digits):
    network, images = digits
    plain = SparseSmooth(gamma=0.0, polish=0, iterations=150)(network, images.images, images.labels)
    sure = SparseSmooth(confidence=0.99, polish=0, iterations=150)(network, images.images, images.labels)
    assert bool((sure.gamma > 0).all())
    assert bool((sure.margin < plain.margin).all())
    g = nm.two_stage(network, images.images[:1])
    noise = nm.Gaussian((images.images + sure.mu)[:1].flatten(1), std=GREY)
    rows = torch.stack([images.labels[:1], sure.towards[:1]], 1)
    covariance = g.outputs(rows).covariance(noise)[0]
    spread = (covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]).sqrt()
    assert float(sure.gamma[0]) == pytest.approx(2.3263 * float(spread), rel=0.05)


def test_targeted_every_other_score_is_below(digits):
    network, images = digits
    targets = (images.labels + 3) % 10
    result = SparseSmooth(samples=300)(network, images.images, images.labels, targets)
    assert torch.equal(result.towards, targets)
    assert int(result.feasible.sum()) >= 11  # where margins tie, no multiple of the shift may be found that holds
    assert float((result.success.rate - 0.95).abs().max()) < 5 * (0.05 * 0.95 * 2 / 300) ** 0.5
    assert torch.equal(result.answers, targets)
    formula = SparseSmooth(gamma=0.1, polish=0, iterations=400)(network, images.images, images.labels, targets)
    held = formula.feasible
    assert int(held.sum()) >= 10
    scores = nm.ExpectedLogits(network, GREY, at=images.images)(images.images, formula.mu)
    margin = fooled_margin(scores, images.labels, targets)
    assert float(margin[held].max()) <= -0.1 + 1e-3


def test_the_same_seed_gives_the_same_and_units_do_not_matter(digits):
    network, images = digits
    x, labels = images.images[:4], images.labels[:4]
    once, again = (SparseSmooth(**QUICK)(network, x, labels) for _ in range(2))
    assert torch.equal(once.mu, again.mu)
    in_grey_levels = SparseSmooth(**QUICK, bounds=(0.0, 255.0), preprocessing=lambda p: p / 255)
    other = in_grey_levels(network, x * 255, labels)
    torch.testing.assert_close((other.l1 + other.tv) / 255, once.l1 + once.tv, rtol=0.02, atol=0)
    assert float(other.sigma[0]) == pytest.approx(1.0)


def test_float64_and_colour():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        network = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 20), nn.ReLU(), nn.Linear(20, 4)
        )
        images = torch.rand(3, 3, 6, 6, dtype=torch.float64)
    network = network.double().eval()
    labels = network(images).argmax(1)
    result = SparseSmooth(**QUICK)(network, images, labels)
    assert result.mu.dtype == torch.float64
    assert result.mu.shape == images.shape
    assert bool((result.feasible & result.fooled).all())


def test_an_image_that_cannot_be_fooled_leaves_its_neighbours_alone(digits):
    """A margin of 20 is out of reach for some digits, which take all turns; others stop, and cost what they do alone.

    Alone, with the others labelled wrong and so skipped, an image has the same samples but other roundings, which may
    lead to other steps: either cost is above that of the optimum by no more than its gap.
    """
    network, images = digits
    attack = SparseSmooth(gamma=20.0, **QUICK)
    all_turns = QUICK["polish"] // 2 + TURNS * QUICK["polish"]
    together = attack(network, images.images, images.labels)
    assert 0 < int(together.feasible.sum()) < len(together)
    assert int(together.polished[~together.feasible].max()) == all_turns
    cost = together.l1 + together.tv
    for image in torch.where(together.fooled, cost, torch.inf).topk(2, largest=False).indices.tolist():
        assert int(together.polished[image]) < all_turns
        others = torch.arange(len(images)) != image
        alone = attack(network, images.images, torch.where(others, (images.labels + 1) % 10, images.labels))
        assert alone.places.tolist() == [image]
        assert bool(alone.feasible & alone.fooled)
        gap = max(float(alone.gap), float(together.gap[image]))
        assert gap < 0.2
        assert abs(math.log(float((alone.l1 + alone.tv) / cost[image]))) <= -math.log1p(-gap)


def test_few_samples_that_fail_are_not_as_asked(digits):
    network, images = digits
    result = SparseSmooth(confidence=0.9, samples=2, polish=0, iterations=20)(network, images.images, images.labels)
    assert not bool(result.fooled[result.success.rate == 0].any())


def test_what_cannot_be_fooled_is_flagged():
    """Scores so far apart that no image within the bounds changes the answer."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        network[3].bias.copy_(torch.tensor([100.0, 0.0, 0.0]))
    result = SparseSmooth(**QUICK)(network, torch.full((2, 1, 4, 4), 0.5), 0)
    assert not bool(result.feasible.any())
    assert not bool(result.fooled.any())
    assert float(result.margin.min()) > 50
    assert bool((result.gap == 1).all())
    assert bool(torch.isfinite(result.mu).all())
    boxed = Targeted(beta=0.1, iterations=20, polish=10, samples=20)(network, torch.full((1, 1, 4, 4), 0.5), 0, 1)
    assert not bool(boxed.feasible.any())
    assert 50 < float(boxed.margin) < 101


def test_a_network_without_a_relu_is_fooled_too():
    """A smooth network on two blobs: the formula is its tangent, the polishing on the network itself does the rest."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 3)).eval()
    images = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(5))
    labels = network(images).argmax(1)
    result = SparseSmooth(confidence=0.9, sigma=0.02, bounds=None, samples=400)(network, images, labels)
    assert bool(result.fooled.all())
    scores = network(result.samples(2000, seed=7).flatten(0, 1)).unflatten(0, (2000, 4))
    seen = (scores.argmax(-1) != labels).double().mean(0)
    assert float((seen - 0.9).abs().max()) < 5 * (0.1 * 0.9 * (1 / 400 + 1 / 2000)) ** 0.5

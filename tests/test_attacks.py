"""The attacks as users call them, on the embedded digits network and on small ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments import data
from netmoments.attacks.box import PixelSupport, Targeted
from netmoments.attacks.margins import fooled_margin
from netmoments.attacks.result import AttackResult
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.network import zoo

GREY = 1 / 255
QUICK = {"iterations": 150, "polish": 40, "samples": 100}


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, data.LabelledImages]:
    return zoo.pretrained("digits").float(), data.load("digits").first(12)


@pytest.fixture(scope="module")
def confident(digits) -> AttackResult:
    network, images = digits
    return SparseSmooth(samples=400)(network, images.images, images.labels)


def affine_relu_affine(generator, images=()) -> nm.AffineReluAffine:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*images, *shape, generator=generator, dtype=torch.float64)

    return nm.AffineReluAffine(draw(5, 12), draw(5), draw(3, 5), draw(3), draw(3, 12))


class TestExpectedLogits:
    @pytest.mark.parametrize("images", [(), (4,)])
    def test_it_is_the_exact_mean(self, generator, images):
        network = affine_relu_affine(generator, images)
        x = torch.randn(4, 12, generator=generator, dtype=torch.float64)
        mu = torch.randn(4, 12, generator=generator, dtype=torch.float64)
        expected = network.mean(nm.Gaussian(x + mu, std=0.3))
        torch.testing.assert_close(nm.ExpectedLogits(network, 0.3)(x, mu), expected, rtol=1e-13, atol=1e-13)

    def test_derivatives(self, generator):
        network = affine_relu_affine(generator)
        x, mu = (torch.randn(2, 12, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
        sigma = torch.tensor([0.2, 0.5], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, mu, s: nm.ExpectedLogits(network, s)(x, mu), (x, mu, sigma))

    def test_of_a_network_it_is_the_two_stage_mean(self, digits):
        network, images = digits
        x = images.images[:3]
        expected = nm.two_stage(network, x).mean(nm.Gaussian(x, std=0.05))
        torch.testing.assert_close(nm.ExpectedLogits(network, 0.05)(x), expected)
        fixed = nm.ExpectedLogits(network, 0.05, at=x)
        torch.testing.assert_close(fixed(x), expected)
        moved = 0.1 * torch.ones_like(x)
        there = nm.two_stage(network, x).mean(nm.Gaussian(x + moved, std=0.05))
        torch.testing.assert_close(fixed(x, moved), there)
        torch.testing.assert_close(fixed(x + moved), there)

    def test_another_librarys_attack_can_climb_it(self, digits):
        """Projected gradient descent as any library has it, on a module in eval mode with frozen weights."""
        network, images = digits
        x, labels = images.images[:4], images.labels[:4]
        model = nm.ExpectedLogits(network, 0.02, at=x)
        assert not model.training
        start = x.clone()
        for _ in range(20):
            start.requires_grad_()
            loss = nn.functional.cross_entropy(model(start), labels, reduction="sum")
            start = (start + 0.03 * torch.autograd.grad(loss, start)[0].sign()).detach()
            start = torch.clamp(torch.clamp(start, x - 0.4, x + 0.4), 0, 1)
        assert bool((model(start).argmax(1) != labels).all())

    def test_bad_input(self, digits, generator):
        network, images = digits
        for sigma in (0.0, -1.0, float("nan"), float("inf"), torch.tensor([0.1, 0.0])):
            with pytest.raises(ValueError, match="sigma must be a standard deviation above 0"):
                nm.ExpectedLogits(network, sigma)
        with pytest.raises(TypeError, match="sigma must be a number or a tensor"):
            nm.ExpectedLogits(network, "much")
        with pytest.raises(ValueError, match="leave out at="):
            nm.ExpectedLogits(affine_relu_affine(generator), 0.1, at=torch.zeros(1, 12))
        with pytest.raises(TypeError, match="images must be a torch tensor"):
            nm.ExpectedLogits(network, 0.1)(images.images.numpy())
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
            nm.ExpectedLogits("digits", 0.1)
        with pytest.raises(ValueError, match="training mode"):
            nm.ExpectedLogits(zoo.pretrained("digits").float().train(), 0.1)
        with pytest.raises(ValueError, match="linearized at 2 images, got"):
            nm.ExpectedLogits(network, 0.1, at=images.images[:2])(images.images[:1])


class TestSparseSmooth:
    def test_as_many_samples_are_fooled_as_was_asked(self, digits, confident):
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

    def test_it_keeps_the_bounds_and_is_sparse(self, confident):
        centre = confident.images + confident.mu
        assert float(centre.min()) >= -1e-7
        assert float(centre.max()) <= 1 + 1e-7
        assert float((confident.mu == 0).double().mean()) > 0.5
        assert torch.equal(confident.l0, (confident.mu.abs() > 1e-3 / 255).flatten(1).sum(1))

    def test_what_the_result_holds(self, confident):
        mu = confident.mu.flatten(1)
        torch.testing.assert_close(confident.l1, mu.abs().sum(1))
        torch.testing.assert_close(confident.l2, (mu**2).sum(1).sqrt())
        torch.testing.assert_close(confident.linf, mu.abs().amax(1))
        assert bool(((confident.gap >= 0) & (confident.gap < 0.5)).all())
        assert bool(((confident.ssim > 0) & (confident.ssim < 1)).all())
        assert bool((confident.towards != confident.labels).all())
        assert bool((confident.answers != confident.labels).all())
        records = confident.records()
        assert len(records) == 12
        assert all(value is None or value == value for record in records for value in record.values())  # no NaN
        assert "12 images" in repr(confident)
        noise = confident.noise
        assert noise.mean.shape == confident.images.shape

    def test_a_margin_of_zero_fools_about_half(self, digits):
        network, images = digits
        result = SparseSmooth(gamma=0.0, samples=400)(network, images.images, images.labels)
        assert 0.35 < float(result.success.rate.mean()) < 0.65
        assert bool(result.fooled.all())

    def test_by_the_formula_alone_it_is_the_papers(self, digits):
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

    def test_confidence_by_the_formula_alone_needs_a_larger_margin(self, digits):
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

    def test_targeted_every_other_score_is_below(self, digits):
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

    def test_one_target_for_all_and_images_already_wrong_are_skipped(self, digits):
        network, images = digits
        labels = images.labels.clone()
        labels[3] = (labels[3] + 1) % 10
        target = next(k for k in range(10) if k not in labels.tolist()[:5])
        result = SparseSmooth(**QUICK)(network, images.images[:5], labels[:5], target)
        assert result.places.tolist() == [0, 1, 2, 4]
        assert [s.place for s in result.skipped] == [3]
        assert result.skipped[0].predicted == int(images.labels[3])
        nothing = SparseSmooth(**QUICK)(network, images.images[3:4], labels[3:4])
        assert len(nothing) == 0
        assert nothing.records() == []
        assert "nothing attacked" in repr(nothing)

    def test_the_same_seed_gives_the_same_and_units_do_not_matter(self, digits):
        network, images = digits
        x, labels = images.images[:4], images.labels[:4]
        once, again = (SparseSmooth(**QUICK)(network, x, labels) for _ in range(2))
        assert torch.equal(once.mu, again.mu)
        in_grey_levels = SparseSmooth(**QUICK, bounds=(0.0, 255.0), preprocessing=lambda p: p / 255)
        other = in_grey_levels(network, x * 255, labels)
        torch.testing.assert_close((other.l1 + other.tv) / 255, once.l1 + once.tv, rtol=0.02, atol=0)
        assert float(other.sigma[0]) == pytest.approx(1.0)

    @pytest.mark.parametrize("polish", [0, 40])
    def test_images_in_groups_are_attacked_like_all_at_once(self, digits, monkeypatch, polish):
        network, images = digits
        x, labels = images.images[:5], images.labels[:5]
        attack = SparseSmooth(gamma=0.0, polish=polish, iterations=150, samples=50)
        together = attack(network, x, labels)
        monkeypatch.setattr("netmoments.attacks.base.TOGETHER", {"cpu": 2, "cuda": 2})
        apart = attack(network, x, labels)
        assert torch.equal(apart.places, together.places)
        torch.testing.assert_close(apart.l1 + apart.tv, together.l1 + together.tv, rtol=5e-3, atol=0)

    def test_float64_and_colour(self):
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

    def test_an_image_that_cannot_be_fooled_leaves_its_neighbours_alone(self, digits):
        """A margin of 20 is out of reach for some digits, which take all turns; others as many as by themselves."""
        network, images = digits
        attack = SparseSmooth(gamma=20.0, **QUICK)
        together = attack(network, images.images, images.labels)
        assert 0 < int(together.feasible.sum()) < len(together)
        assert int(together.polished[~together.feasible].max()) == 20 + 4 * 40
        assert int(together.polished[together.feasible].min()) < 20 + 4 * 40
        first = int(together.feasible.nonzero()[0])
        alone = attack(network, images.images[: first + 1], images.labels[: first + 1])
        assert bool(alone.feasible[first])
        assert int(alone.polished[first]) == int(together.polished[first])
        cost, other = (result.l1[first] + result.tv[first] for result in (alone, together))
        torch.testing.assert_close(cost, other, rtol=5e-3, atol=0)

    def test_few_samples_that_fail_are_not_as_asked(self, digits):
        network, images = digits
        result = SparseSmooth(confidence=0.9, samples=2, polish=0, iterations=20)(network, images.images, images.labels)
        assert not bool(result.fooled[result.success.rate == 0].any())

    def test_what_cannot_be_fooled_is_flagged(self):
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


class TestBoxes:
    def test_targeted(self, digits):
        network, images = digits
        targets = (images.labels + 1) % 10
        attack = Targeted(beta=0.3, samples=100)
        result = attack(network, images.images, images.labels, targets)
        assert float(result.linf.max()) <= 0.3 + 1e-6
        assert bool(((result.sigma > 0) & (result.sigma <= 2**0.5 * GREY * (1 + 1e-6))).all())
        assert float((images.images + result.mu).min()) >= -1e-6
        assert float((images.images + result.mu).max()) <= 1 + 1e-6
        assert float(result.success.rate.mean()) > 0.8
        wider = dataclasses.replace(attack, beta=0.5)(network, images.images, images.labels, targets)
        assert float(wider.network_margin.mean()) < float(result.network_margin.mean())

    def test_the_margin_is_the_formulas_and_nearly_the_least(self, digits):
        network, images = digits
        x, labels = images.images[:4], images.labels[:4]
        targets = (labels + 1) % 10
        result = Targeted(beta=0.1, polish=0)(network, x, labels, targets)
        scores = nm.ExpectedLogits(network, result.sigma, at=x)(x, result.mu)
        torch.testing.assert_close(fooled_margin(scores, labels, targets), result.margin, atol=1e-3, rtol=1e-3)
        assert float(result.gap.max()) < 0.05
        assert torch.equal(result.feasible, result.margin < 0)

    def test_few_pixels(self, digits):
        network, images = digits
        result = PixelSupport(percent=10, beta=1.0, seed=3)(network, images.images, images.labels)
        changed = (result.mu != 0).flatten(1).sum(1)
        assert int(changed.max()) <= round(0.1 * 64)
        assert int(changed.min()) >= 1
        assert not torch.equal(result.mu[0] != 0, result.mu[1] != 0)
        again = PixelSupport(percent=10, beta=1.0, seed=3)(network, images.images, images.labels)
        assert torch.equal(result.mu, again.mu)

    def test_more_pixels_do_more(self, digits):
        network, images = digits
        margins = [
            float(PixelSupport(percent=p, beta=0.5, polish=0)(network, images.images, images.labels).margin.mean())
            for p in (5, 30, 100)
        ]
        assert margins[0] > margins[1] > margins[2]

    def test_a_mask(self, digits):
        network, images = digits
        mask = torch.zeros(8, 8, dtype=torch.bool)
        mask[2:5, 2:6] = True
        result = PixelSupport(mask=mask, beta=1.0)(network, images.images, images.labels)
        assert not bool(result.mu[..., ~mask].any())
        assert bool(result.mu[..., mask].any())
        each = torch.zeros(12, 1, 8, 8, dtype=torch.bool)
        for number in range(12):  # one pixel more for each
            each[number].view(-1)[20 : 21 + number] = True
        result = PixelSupport(mask=each, beta=1.0)(network, images.images, images.labels)
        assert not bool(result.mu[~each].any())
        targets = (images.labels + 1) % 10
        towards = PixelSupport(mask=mask, beta=1.0)(network, images.images, images.labels, targets)
        assert torch.equal(towards.towards, targets)

    def test_the_network_is_followed_where_the_formula_fails(self, digits):
        network, images = digits
        alone = PixelSupport(percent=12, beta=0.6, polish=0)(network, images.images, images.labels)
        both = PixelSupport(percent=12, beta=0.6)(network, images.images, images.labels)
        assert float(both.success.rate.mean()) >= float(alone.success.rate.mean())
        assert bool((both.polished[alone.success.rate >= 0.95] == 0).all())


SETTINGS = [
    (SparseSmooth, {"sigma": 0.0}, "sigma must be a standard deviation above 0"),
    (SparseSmooth, {"sigma": -1.0}, "sigma must be a standard deviation above 0"),
    (SparseSmooth, {"confidence": 1.0}, "confidence must be between 0 and 1, got 1.0"),
    (SparseSmooth, {"confidence": 0.0}, "confidence must be between 0 and 1"),
    (SparseSmooth, {"gamma": -0.1}, "gamma must be a margin of at least 0"),
    (SparseSmooth, {"gamma": float("nan")}, "gamma must be a margin of at least 0"),
    (SparseSmooth, {"gamma": 1.0, "confidence": 0.9}, "got both"),
    (SparseSmooth, {"gamma": "a"}, "gamma must be a margin"),
    (SparseSmooth, {"confidence": "a"}, "confidence must be between"),
    (SparseSmooth, {"rivals": 0}, "rivals must be a whole number of at least 1"),
    (SparseSmooth, {"iterations": 0}, "iterations must be a whole number of at least 1"),
    (SparseSmooth, {"polish": -1}, "polish must be a whole number of at least 0"),
    (SparseSmooth, {"samples": 1}, "samples must be a whole number of at least 2"),
    (SparseSmooth, {"bounds": (1.0, 0.0)}, "bounds must be finite with the lowest first"),
    (SparseSmooth, {"bounds": 255}, "bounds must be two numbers"),
    (Targeted, {"beta": 0.0}, "beta must be a number above 0"),
    (Targeted, {"largest_sigma": -1.0}, "largest_sigma must be a number above 0"),
    (Targeted, {"wanted": 1.5}, "wanted must be a share of samples"),
    (PixelSupport, {"percent": 0.0}, r"percent must be in \(0, 100\]"),
    (PixelSupport, {"percent": 101}, r"percent must be in \(0, 100\]"),
    (PixelSupport, {}, "got neither"),
    (PixelSupport, {"percent": 1, "mask": torch.ones(8, 8, dtype=torch.bool)}, "got both"),
]


@pytest.mark.parametrize(("attack", "settings", "message"), SETTINGS)
def test_settings_that_mean_nothing_are_refused(attack, settings, message):
    with pytest.raises(ValueError, match=message):
        attack(**settings)


def test_bad_images_labels_and_targets(digits):
    network, images = digits
    x, labels = images.images[:3], images.labels[:3]
    attack = SparseSmooth(**QUICK)
    broken = x.clone()
    broken[1, 0, 2, 2] = float("nan")
    cases = [
        ((network, broken, labels), "images must be finite, got 1 NaN"),
        ((network, x * 255, labels), r"images must be within the bounds \(0, 1\), got values from 0 to 255"),
        ((network, x[0], labels), r"images must be a batch \(N, C, H, W\)"),
        ((network, x, labels, labels), "a target must differ from the label; they are equal for images"),
        ((network, x, labels, torch.tensor([10, 1, 1])), "targets must be from 0 to 9, got"),
        ((network, x, labels[:2]), "labels must be one number or one for each of 3 images"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            attack(*arguments)
    for wrong in (labels.float(), None, "3"):
        with pytest.raises(TypeError, match="labels must be whole numbers"):
            attack(network, x, wrong)
    with pytest.raises(ValueError, match="one for all or one for each of 3"):
        PixelSupport(mask=torch.ones(2, 1, 8, 8, dtype=torch.bool))(network, x, labels)
    with torch.inference_mode():
        assert len(attack(network, x * 1.0, labels)) == 3
    with pytest.raises(ValueError, match="training mode"):
        attack(zoo.pretrained("digits").float().train(), x, labels)
    with pytest.raises(ValueError, match="give targets="):
        Targeted()(network, x, labels)
    with pytest.raises(ValueError, match="no pixel that may change"):
        PixelSupport(mask=torch.zeros(8, 8, dtype=torch.bool))(network, x, labels)
    with pytest.raises(ValueError, match="must broadcast"):
        PixelSupport(mask=torch.ones(7, 8, dtype=torch.bool))(network, x, labels)
    with pytest.raises(TypeError, match="boolean tensor"):
        PixelSupport(mask=torch.ones(8, 8))
    just_outside = x.clone()
    just_outside[0, 0, 0, 0] = -5e-7
    assert len(attack(network, just_outside, labels)) == 3
    with pytest.raises(MemoryError):
        SparseSmooth(**QUICK, memory_budget=1000)(network, x, labels)

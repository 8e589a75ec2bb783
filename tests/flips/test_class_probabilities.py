import pytest
import torch

import netmoments as nm
from tests.flips.classifiers import Corner, Rounded, at_distance, linear, tail


@pytest.mark.parametrize("distance", [0.0, 1.5])
def test_two_classes(distance):
    network = linear()
    found = nm.class_probabilities(network, nm.Gaussian(at_distance(network, distance), std=1.0))
    truth = tail(distance)
    assert float(found.probability.sum()) == pytest.approx(1)
    assert abs(float(found.probability[1]) - truth) < 5 * float(found.standard_error[1])
    assert bool(found.met)
    assert int(found.runs) <= 0.5 * truth * (1 - truth) * 196**2


def test_many_classes_as_plain_samples_have_them():
    """Four classes, against 50,000 plain samples: five standard errors of the difference."""
    network = linear(classes=4, seed=1)
    noise = nm.Gaussian(torch.zeros(2, 12), std=1.0)
    found = nm.class_probabilities(network, noise)
    assert found.probability.shape == (2, 4)
    assert found.interval.shape == (2, 4, 2)
    x = torch.randn(50_000, 12, generator=torch.Generator().manual_seed(5))
    shares = network(x).argmax(1).bincount(minlength=4) / 50_000
    error = torch.hypot(found.standard_error[0], (shares * (1 - shares) / 50_000).sqrt())
    assert bool(((found.probability[0] - shares).abs() < 5 * error).all())
    assert bool((found.interval[..., 0] <= found.probability).all())
    assert bool((found.probability <= found.interval[..., 1]).all())


def test_two_layers_and_no_gradients():
    noise = nm.Gaussian(torch.zeros(6), std=1.0)
    for network, truth in ((Corner(0.5, 1.0), Corner.probability(0.5, 1.0)), (Rounded(1.0), tail(1.0))):
        found = nm.class_probabilities(network.eval(), noise)
        assert abs(float(found.probability[1]) - truth) < 5 * float(found.standard_error[1])


def test_without_noise_one_class_wins():
    network = linear()
    found = nm.class_probabilities(network, nm.Gaussian(at_distance(network, 1.0), std=0.0))
    assert found.probability.tolist() == [1.0, 0.0]


def test_what_is_refused():
    noise = nm.Gaussian(torch.zeros(12), std=1.0)
    with pytest.raises(ValueError, match="absolute_error must be a number above 0"):
        nm.class_probabilities(linear(), noise, absolute_error=-0.1)
    with pytest.raises(ValueError, match=r"absolute_error must be below 0.5, such as 0.01 for one point, got 1"):
        nm.class_probabilities(linear(), noise, absolute_error=1)
    with pytest.raises(ValueError, match="at least two scores"):
        nm.class_probabilities(linear(classes=1), noise)


def test_time_that_is_over_before_anything_was_found():
    """All classes are alike, from 0 to 1; `OutOfTime` stays inside."""
    found = nm.class_probabilities(torch.nn.Identity().eval(), nm.Gaussian(torch.eye(4), std=1.0), seconds=1e-9)
    assert found.probability.sum(1).tolist() == [1.0] * 4
    assert bool((found.interval == torch.tensor([0.0, 1.0], dtype=torch.float64)).all())
    assert not bool(found.met.any())

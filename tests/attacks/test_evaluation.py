"""How noise is judged: likeness, intervals, and samples that the network sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from netmoments import memory
from netmoments.attacks.evaluation import Success, fooled_margin, noisy_scores, scores_of, structural_similarity
from tests.attacks.problems import random_images, small_network


def test_structural_similarity_is_that_of_a_filter(generator):
    x, y = (torch.rand(2, 1, 20, 24, generator=generator, dtype=torch.float64) for _ in range(2))

    def local(image: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(image, 1.5, truncate=5 / 1.5)[5:-5, 5:-5]

    for number, ours in enumerate(structural_similarity(x, y, 1.0).tolist()):
        a, b = x[number, 0].numpy(), y[number, 0].numpy()
        ma, mb = local(a), local(b)
        va, vb, vab = local(a * a) - ma**2, local(b * b) - mb**2, local(a * b) - ma * mb
        likeness = (2 * ma * mb + 1e-4) * (2 * vab + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
        assert ours == pytest.approx(likeness.mean(), rel=1e-10)
    torch.testing.assert_close(structural_similarity(x, x, 1.0), torch.ones(2, dtype=torch.float64))


def test_scores_in_pieces_are_those_of_all_together(generator, monkeypatch):
    network, images = small_network(), random_images(generator)
    taken: list[int] = []
    handle = network.register_forward_pre_hook(lambda module, inputs: taken.append(len(inputs[0])))
    whole = scores_of(network, images)
    monkeypatch.setitem(memory.PIECE["cpu"], "inputs", 2 * images[0].numel() * images.element_size())
    torch.testing.assert_close(scores_of(network, images), whole)
    handle.remove()
    assert taken == [3, 2, 1]


def test_samples_of_an_image_do_not_depend_on_the_images_beside_it(generator):
    network, images = small_network(), random_images(generator)
    labels, sigma = torch.tensor([0, 1, 2]), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    places = torch.tensor([4, 7, 9])

    def sampled(chosen, bounds=None):
        return torch.cat(list(noisy_scores(network, images[chosen], sigma[chosen], places[chosen], 120, 3, bounds)))

    once = sampled([0, 1, 2])
    assert once.shape == (120, 3, 4)
    assert torch.equal(once, sampled([0, 1, 2]))
    torch.testing.assert_close(once[:, [2]], sampled([2]))
    torch.testing.assert_close(once[:, [2, 0]], sampled([2, 0]))
    assert not torch.equal(once, sampled([0, 1, 2], (0.2, 0.8)))
    frequency = Success.of(fooled_margin(once, labels, None) < 0)
    assert bool((frequency.low <= frequency.rate).all())
    assert bool((frequency.rate <= frequency.high).all())


def test_a_rate_reaches_a_share_to_within_its_standard_errors():
    """Of 100 samples 0.9 is known to 0.03: 0.84 is two of these below."""
    fooled = torch.arange(100).unsqueeze(1) < torch.tensor([100, 90, 85, 83, 0])
    success = Success.of(fooled)
    assert success.reaches(0.9, 2.0).tolist() == [True, True, True, False, False]
    assert success.reaches(0.9, 0.0).tolist() == [True, True, False, False, False]

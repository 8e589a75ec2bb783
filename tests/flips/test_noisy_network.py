import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.flips.noisy_network import (
    Clock,
    NoisyNetwork,
    OutOfTime,
    are_probabilities,
    batches,
    in_order,
    inputs_together,
    results_of_inputs,
    run_together,
    seed_of_input,
)
from netmoments.sampling.fast_network import FastNetwork, fast_network
from tests.flips.classifiers import at_distance, linear, noisy_network, run_alone

SIZE = 5
MEAN = torch.arange(1.0, 1.0 + SIZE)
FACTOR = torch.randn(SIZE, 2, generator=torch.Generator().manual_seed(3))
MATRIX = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(4))
NOISES = {
    "isotropic": nm.Gaussian(MEAN, std=0.3),
    "diagonal": nm.Gaussian(MEAN, covariance=MEAN),
    "dense": nm.Gaussian(MEAN, covariance=nm.Dense(MATRIX @ MATRIX.mT)),
    "low rank": nm.Gaussian(MEAN, covariance=nm.LowRank(FACTOR, 0.1)),
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_margins_and_gradients_of_a_linear_network(noise):
    """f = (w₀ − w_j)·x, and its gradient in ε is Lᵀ(w₀ − w_j)."""
    network = linear(SIZE, classes=3)
    noisy = noisy_network(network, noise)
    white = noisy.normal(7)
    rivals = torch.tensor([1, 2, 1, 2, -1, -1, -1])
    found, gradients = run_alone(noisy.with_gradients(white, rivals))
    x = noisy.inputs(white)
    scores = network(x).detach().double()
    torch.testing.assert_close(found[:, 1:], scores[:, :1] - scores[:, 1:], rtol=1e-5, atol=1e-5)
    assert bool((found[:, 0] == torch.inf).all())
    torch.testing.assert_close(run_alone(noisy.margins_at(white)), found, rtol=1e-5, atol=1e-5)
    root = noise.covariance.root()
    chosen = torch.where(rivals < 0, found.argmin(1), rivals)
    wanted = (network.weight[0] - network.weight[chosen]) @ root
    torch.testing.assert_close(gradients, wanted.detach(), rtol=1e-4, atol=1e-5)


def test_samples_have_the_covariance_of_the_noise():
    """Entries of a sample covariance from 20,000 samples: within five standard errors, √(2/n)·max variance."""
    noise = NOISES["low rank"]
    noisy = noisy_network(linear(SIZE), noise)
    x = noisy.inputs(noisy.normal(20_000)).double()
    wanted = noise.covariance.dense().double()
    error = 5 * (2 / 20_000) ** 0.5 * float(wanted.diagonal().max())
    assert float((x.mT.cov() - wanted).abs().max()) < error


def test_runs_are_counted_and_a_gradient_counts_two_more():
    noisy = noisy_network(linear(SIZE), NOISES["isotropic"])
    run_alone(noisy.margins_at(noisy.normal(10)))
    assert noisy.runs == 10
    run_alone(noisy.with_gradients(noisy.normal(4), torch.full((4,), -1)))
    assert noisy.runs == 22


def test_outputs_that_are_no_numbers_are_refused():
    class Root(nn.Module):
        def forward(self, x):
            return torch.cat([x[:, :1].sqrt(), x[:, 1:]], 1)

    noisy = noisy_network(Root().eval(), nm.Gaussian(torch.full((SIZE,), 1.0), std=1.0))
    with pytest.raises(ValueError, match=r"NaN or infinite outputs.*less noise"):
        run_alone(noisy.margins_at(noisy.normal(200)))


def test_time_is_over():
    network = linear(SIZE)
    flat = NOISES["isotropic"].flattened()
    model = nm.NetworkModel(network, flat.mean)
    noisy = NoisyNetwork(model, fast_network(model), flat, 0, torch.Generator().manual_seed(0), Clock(seconds=1e-9))
    with pytest.raises(OutOfTime):
        run_alone(noisy.margins_at(noisy.normal(2)))


def test_probabilities_are_compared_by_their_logarithms():
    """A softmax over scores has the margins of the scores themselves, and their gradients."""
    network = linear()
    softmax = torch.nn.Sequential(network, torch.nn.Softmax(1)).eval()
    noise = nm.Gaussian(at_distance(network, 3.0), std=1.0)
    plain, ended = noisy_network(network, noise), noisy_network(softmax, noise)
    assert run_alone(ended.returns_probabilities())
    assert not run_alone(plain.returns_probabilities())
    white = plain.normal(20)
    values = (run_alone(noisy.margins_at(white)) for noisy in (ended, plain))
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)
    rivals = torch.full((20,), -1)
    found = (run_alone(noisy.with_gradients(white, rivals)) for noisy in (ended, plain))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_scores_that_sum_to_1_at_the_mean_only_are_no_probabilities():
    network = linear(2, classes=2)
    network.weight.data = torch.eye(2)
    noisy = noisy_network(network, nm.Gaussian(torch.tensor([1.0, 0.0]), std=0.1))
    assert not run_alone(noisy.returns_probabilities())


def test_probabilities_are_not_negative_and_sum_to_1():
    assert are_probabilities(torch.tensor([[0.2, 0.8], [1.0, 0.0]]))
    assert not are_probabilities(torch.tensor([[0.2, 0.9]]))
    assert not are_probabilities(torch.tensor([[-0.5, 1.5]]))


def scores_of(noisy, sizes):
    async def work():
        found = [await noisy.margins_at(noisy.normal(size)) for size in sizes]
        await noisy.with_gradients(noisy.normal(3), torch.full((3,), -1))
        return torch.cat(found)

    return work()


def test_many_inputs_go_through_the_network_together(monkeypatch):
    """Three inputs ask for different numbers of runs: each gets its own margins, from few batches of the network."""
    network, noise = linear(SIZE, classes=3), NOISES["dense"]
    sizes = [(4, 9), (7,), (1, 2, 3)]
    apart = [run_alone(scores_of(noisy_network(network, noise, label, seed=label), sizes[label])) for label in range(3)]
    every = [noisy_network(network, noise, label, seed=label) for label in range(3)]
    for noisy in every[1:]:
        noisy.fast = every[0].fast  # as if of one call
    seen, values = [], type(every[0].fast).values
    monkeypatch.setattr(type(every[0].fast), "values", lambda fast, x: seen.append(len(x)) or values(fast, x))
    found = dict(run_together((scores_of(noisy, sizes[label]) for label, noisy in enumerate(every)), 3))
    for label in range(3):
        torch.testing.assert_close(found[label], apart[label], rtol=1e-5, atol=1e-5)
        assert every[label].runs == sum(sizes[label]) + 9
    assert seen == [3 * 8, 4 + 7 + 1, 9 + 2, 3]


def test_inputs_share_batches_within_a_budget_of_memory(monkeypatch):
    """With room for all there are as many batches as without a budget."""
    network, noise = linear(SIZE), nm.Gaussian(at_distance(linear(SIZE), 3.0).expand(6, -1), std=1.0)
    seen, values = [], FastNetwork.values
    monkeypatch.setattr(FastNetwork, "values", lambda fast, x: seen.append(len(x)) or values(fast, x))
    nm.flip_probability(network, noise, runs=1000, memory_budget=2**34)
    within, seen[:] = len(seen), []
    nm.flip_probability(network, noise, runs=1000)
    assert within == len(seen)


def test_no_more_inputs_at_a_time_than_allowed():
    begun = []

    async def work(noisy):
        begun.append(noisy)
        await noisy.margins_at(noisy.normal(2))
        return len(begun)

    noisy = [noisy_network(linear(SIZE), NOISES["isotropic"]) for _ in range(5)]
    assert sorted(count for _, count in run_together(map(work, noisy), 2)) == [2, 2, 4, 4, 5]


def test_results_of_inputs_come_as_they_end_with_their_places():
    """Each input is worked on under its own noise and label, as often as it asks for runs."""
    model, noise = nm.NetworkModel(linear(SIZE, classes=3), MEAN.unsqueeze(0)), nm.Gaussian(torch.eye(3, SIZE), std=0.1)

    async def work(noisy):
        for _ in range(3 - noisy.label):
            await noisy.margins_at(noisy.normal(1))
        return noisy.mean, noisy.label

    found = list(results_of_inputs(work, "", model, noise, [0, 1, 2], seed=0, purpose="flips", clock=Clock()))
    assert sorted(place for place, _ in found) == [0, 1, 2]
    for place, (mean, label) in enumerate(in_order(found)):
        assert label == place
        assert torch.equal(mean, noise.mean[place])


def test_work_that_fails_ends_the_others():
    closed = []

    async def work(noisy, fails):
        try:
            await noisy.margins_at(noisy.normal(2))
            if fails:
                raise ZeroDivisionError
            await noisy.margins_at(noisy.normal(2))
        finally:
            closed.append(fails)

    noisy = [noisy_network(linear(SIZE), NOISES["isotropic"]) for _ in range(2)]
    with pytest.raises(ZeroDivisionError):
        list(run_together([work(noisy[0], False), work(noisy[1], True)], 2))
    assert sorted(closed) == [False, True]


def test_rows_of_several_make_full_batches():
    found = [[(part.request, part.rows.start, part.rows.stop) for part in parts] for parts in batches([3, 0, 5, 1], 4)]
    assert found == [[(0, 0, 3), (2, 0, 1)], [(2, 1, 5)], [(3, 0, 1)]]


def test_as_many_inputs_as_fill_a_batch_and_memory():
    model = nm.NetworkModel(linear(SIZE), MEAN.unsqueeze(0))
    assert 1 <= inputs_together(model, NOISES["isotropic"].flattened()) <= 16


def test_an_input_has_its_own_seed_wherever_it_is():
    assert seed_of_input(0, "flips", MEAN) == seed_of_input(0, "flips", MEAN.clone()) != seed_of_input(1, "flips", MEAN)
    assert seed_of_input(0, "flips", MEAN) != seed_of_input(0, "flips", MEAN + 1)


class TwoOutputs(nn.Module):
    def forward(self, x):
        return {"logits": x[:, :3], "boxes": 100 * x[:, 3:].sigmoid()}


@pytest.mark.parametrize("function", [nm.flip_probability, nm.class_probabilities, nm.nearest_flip])
def test_what_the_scores_are_must_be_said_where_there_are_several_outputs(function):
    noise = nm.Gaussian(torch.tensor([0.5, 1.0, 0.0, 0.3]), std=0.1)
    with pytest.raises(ValueError, match="returns 2 outputs, 'logits', 'boxes'; say with key="):
        function(TwoOutputs().eval(), noise)
    function(TwoOutputs().eval(), noise, key="logits")


@pytest.mark.parametrize("function", [nm.flip_probability, nm.class_probabilities, nm.nearest_flip])
def test_maps_of_scores_are_refused(function):
    with pytest.raises(ValueError, match=r"one vector of scores.*got outputs of shape \(2, 4, 4\)"):
        function(nn.Conv2d(1, 2, 1).eval(), nm.Gaussian(torch.zeros(1, 4, 4), std=0.1))

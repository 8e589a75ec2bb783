"""Exported programs: the names of their modules, cut, linearized and propagated as the module they came from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.network.exported import ExportedNetwork
from netmoments.network.model import network_of
from netmoments.network.relu_calls import Cut
from tests.closeness import assert_close
from tests.network.small import POINT, small
from tests.networks import Block, seeded


class ForExport(nn.Module):
    """All kinds of ReLU calls, with a skip connection, for (2, 5, 5) images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.block = nn.Conv2d(2, 3, 3), Block(3)
        self.hidden, self.last = nn.Linear(27, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        z.relu_()
        return self.last(torch.clamp(self.hidden(self.block(z).flatten(1)), min=0))


EXPORTS = {"fixed": (1, None), "dynamic": (3, ({0: torch.export.Dim("batch", min=1, max=64)},))}


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return seeded(ForExport)


@pytest.fixture(scope="module", params=EXPORTS)
def exported(request, plain) -> torch.export.ExportedProgram:
    batch, dynamic = EXPORTS[request.param]
    example = torch.zeros(batch, 2, 5, 5, dtype=torch.float64)
    return torch.export.export(plain, (example,), dynamic_shapes=dynamic)


def images(count: int) -> Tensor:
    return torch.randn(count, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_an_exported_program_has_the_names_of_its_modules(exported, plain):
    wanted = ["network#0", "block.relu1", "block.relu2", "network#1"]
    for net in (plain, exported, exported.module(), network_of(exported, "test")):
        found = nm.relus(net, images(2))
        assert [relu.name for relu in found] == wanted
        assert [relu.shape for relu in found] == [(3, 3, 3)] * 3 + [(6,)]


def test_an_exported_program_is_cut_and_linearized_as_its_network(exported, plain):
    x = images(3)
    for relu, same in zip(nm.relus(exported, x), nm.relus(plain, x), strict=True):
        cut, expected = Cut(network_of(exported, "test"), relu), Cut(plain, same)
        assert_close(cut.stem(x), expected.stem(x), atol=1e-14)
        y = torch.rand(3, *relu.shape, dtype=torch.float64)
        assert_close(cut.head(x, y), expected.head(x, y), atol=1e-14)
        g, h = nm.two_stage(exported, x, relu.index), nm.two_stage(plain, x, relu.name)
        assert (g.D is None) == (h.D is None) == (relu.name in ("block.relu2", "network#1", "network#0"))
        for part in ("A", "c1", "B", "c2") if g.D is None else ("A", "c1", "B", "c2", "D"):
            assert_close(getattr(g, part), getattr(h, part), atol=1e-13, what=f"{relu.name} {part}")


def test_an_exported_program_inside_a_network(exported, plain):
    x = images(3)
    net = nn.Sequential(nn.Identity(), network_of(exported, "test")).eval()
    assert [relu.name for relu in nm.relus(net, x)] == [f"1#{number}" for number in range(4)]
    for layer in range(4):
        assert_close(nm.two_stage(net, x, layer).A, nm.two_stage(plain, x, layer).A, atol=1e-13)


def test_an_exported_program_is_saved_loaded_and_used(exported, plain, tmp_path):
    torch.export.save(exported, tmp_path / "network.pt2")
    net = nm.load_network(tmp_path / "network.pt2")
    assert isinstance(net, ExportedNetwork)
    assert not net.train().training
    x = images(4)
    assert_close(net(x), plain(x), atol=1e-14)
    noise = nm.Gaussian(x, std=0.05)
    for method in ("two-stage", "linear"):
        found, expected = nm.output_moments(net, noise, method), nm.output_moments(plain, noise, method)
        assert_close(found.mean, expected.mean, atol=1e-13)
        assert_close(found.covariance, expected.covariance, atol=1e-14)
    assert nm.output_moments(net, noise, nm.TwoStage("block.relu1")).cut == "block.relu1"
    sampled, reference = (nm.monte_carlo(which, noise, 500) for which in (net, plain))
    assert_close(sampled.variance, reference.variance, rtol=1e-10)


def test_an_exported_program_for_batches_of_three_is_refused():
    program = torch.export.export(seeded(small, torch.float32), (torch.zeros(3, 4),))
    with pytest.raises(ValueError, match=r"batches of exactly 3; export it with a batch of 1, or with a free one"):
        nm.relus(program, POINT)
    fixed = torch.export.export(seeded(small, torch.float32), (torch.zeros(1, 4),))
    with pytest.raises(ValueError, match=r"cannot take an input of shape \(5,\)"):
        nm.relus(fixed, torch.zeros(1, 5))


def test_an_exported_network_with_a_largest_batch(tmp_path):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    batch = torch.export.Dim("batch", min=1, max=4)
    program = torch.export.export(net, (torch.rand(2, 6),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = nm.load_network(tmp_path / "net.pt2")
    for form in (program, program.module(), loaded):
        assert network_of(form, "test").largest == 4
    x = torch.rand(10, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), net(x))
    noise = nm.Gaussian(x, std=0.1)
    found, expected = (nm.output_moments(which, noise, "two-stage") for which in (loaded, net))
    torch.testing.assert_close(found.variance, expected.variance)


def test_an_exported_program_is_propagated_as_its_network(exported, plain, tmp_path):
    torch.export.save(exported, tmp_path / "network.pt2")
    loaded = nm.load_network(tmp_path / "network.pt2")
    inside = nn.Sequential(nn.Identity(), loaded).eval()
    noise = nm.Gaussian(images(2), std=0.1)
    methods = {
        "layerwise": (exported, inside, loaded),
        "sketch": (exported.module(), nm.NetworkModel(exported, images(1)), loaded),
        "auto": (exported.module(), inside, loaded),
    }
    for method, nets in methods.items():
        expected = nm.output_moments(plain, noise, method)
        for net in nets:
            found = nm.output_moments(net, noise, method)
            assert found.method == expected.method
            assert_close(found.mean, expected.mean, atol=1e-12, what=method)
            assert_close(found.covariance, expected.covariance, atol=1e-12, what=method)

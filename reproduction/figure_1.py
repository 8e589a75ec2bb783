"""The paper's Figure 1: a network cut at one ReLU and made affine before and after it, drawn for any network."""

from __future__ import annotations

import time
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from netmoments.memory import gigabytes
from netmoments.network import zoo
from netmoments.network.exported import ExportedNetwork
from netmoments.network.loading import load_network
from netmoments.network.relu_calls import Cut, find_relu
from netmoments.network.validate import as_network, inspect
from netmoments.precision import full_precision
from reproduction.figure_1_chart import Anatomy, draw_anatomy
from reproduction.outcome import Drawing, Outcome, Panel
from reproduction.settings import Settings

NAME = "figure-1"
MNIST_SHAPE = (1, 28, 28)


def reproduce(settings: Settings) -> Outcome:
    start = time.perf_counter()
    network = network_to_draw(settings.model, settings.weights)
    anatomy = anatomy_of(settings.model, network, input_shape(settings.model, network), settings.layer)
    kept = anatomy.relus[anatomy.kept]
    return Outcome(
        name=NAME,
        title="Figure 1: the two-stage linearization",
        reading=_words(anatomy),
        comparisons=(),
        panels=(_panel(anatomy),),
        drawings=(
            Drawing(
                NAME,
                f"Two-stage linearization of {anatomy.model} at its ReLU {kept.name}: everything before and after it "
                "becomes affine at a point, and the moments of what is left are known in closed form.",
                partial(draw_anatomy, anatomy),
            ),
        ),
        numbers={
            "model": anatomy.model,
            "inputs": anatomy.inputs,
            "outputs": anatomy.outputs,
            "kept": kept.name,
            "path_around": anatomy.around,
            "relus": [
                {"name": relu.name, "shape": list(relu.shape), "units": relu.size, "memory": anatomy.memory(relu.size)}
                for relu in anatomy.relus
            ],
        },
        seconds=time.perf_counter() - start,
    )


def network_to_draw(model: str, weights: Path | None) -> nn.Module:
    """The network; one of the zoo that comes without weights is drawn untrained, as only its shapes matter."""
    if weights is None and model in zoo.ZOO and zoo.entry(model).shipped is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return zoo.build(model)
    return load_network(model, weights)


def input_shape(model: str, network: nn.Module) -> tuple[int, ...]:
    """What one input looks like: known of the zoo and of exported programs; of others MNIST's shape is supposed."""
    if model in zoo.ZOO:
        return zoo.entry(model).input_shape
    if isinstance(network, ExportedNetwork):
        for node in network.program.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
                return tuple(int(size) for size in node.meta["val"].shape[1:])
    return MNIST_SHAPE


def anatomy_of(model: str, network: nn.Module, shape: tuple[int, ...], layer: int | str) -> Anatomy:
    """The network's ReLUs from one run on random pixels, and whether a path goes around the kept one."""
    network = as_network(network, NAME)
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    example = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        found = inspect(network, example, NAME)
    except ValueError as error:
        if model in zoo.ZOO or isinstance(network, ExportedNetwork):
            raise
        raise ValueError(
            f"{error}\n{model} was given an image of MNIST's shape, {tuple(shape)}, as nothing says what it takes; "
            f"torch.export.save it as a .pt2 file, which knows its input"
        ) from error
    kept = find_relu(found.relus, layer)
    around = _goes_around(Cut(network, kept), example)
    name = Path(model).stem if model.endswith(".pt2") else Path(model).name
    return Anatomy(name, found.relus, kept.index, tuple(shape), int(found.output.shape[1]), around)


def _goes_around(cut: Cut, example: Tensor) -> bool:
    """Whether the scores depend on the input with the ReLU's output held fixed."""
    with torch.inference_mode(False), torch.enable_grad(), full_precision():
        x = example.clone().requires_grad_()
        y = torch.relu(cut.stem(example)).detach()
        out = cut.head(x, y)
        if not out.requires_grad:
            return False
        weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
        (slope,) = torch.autograd.grad(out, x, weights, allow_unused=True)
    return slope is not None and bool(slope.any())


def _words(anatomy: Anatomy) -> tuple[str, ...]:
    kept = anatomy.relus[anatomy.kept]
    q, n, d = kept.size, prod(anatomy.shape), anatomy.outputs
    around = f", and D {d} × {n:,} for the paths around the ReLU" if anatomy.around else ""
    return (
        f"{anatomy.model} has {len(anatomy.relus)} ReLU calls. Number {anatomy.kept + 1} in their order, {kept.name}, "
        f"is kept (the paper's l = {anatomy.kept + 1}); what comes before becomes A x + c₁ with A {q:,} × {n:,}, what "
        f"comes after B y + c₂ with B {d} × {q:,}{around}.",
        "A and B hold q(n + d) numbers, not 2q + n + d as the paper has it: a Jacobian has as many rows as outputs. "
        "Units without influence on the scores are dropped, so that it is often less.",
    )


def _panel(anatomy: Anatomy) -> Panel:
    rows = tuple(
        (
            f"{relu.index + 1}{' ←' if relu.index == anatomy.kept else ''}",
            relu.name,
            "×".join(map(str, relu.shape)),
            f"{relu.size:,}",
            f"{anatomy.memory(relu.size):,}",
            gigabytes(4 * anatomy.memory(relu.size)),
        )
        for relu in anatomy.relus
    )
    return Panel(
        title=f"The ReLUs of {anatomy.model}, {prod(anatomy.shape):,} inputs and {anatomy.outputs} scores",
        columns=("l", "name", "shape", "units q", "q(n + d)", "in float32"),
        rows=rows,
        caption="q(n + d): the numbers in A and B. ← the ReLU that is kept.",
        emphasis=(1,),
    )

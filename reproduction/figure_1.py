"""The paper's Figure 1: draw how any network is cut at one ReLU and made affine before and after it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from netmoments.memory import gigabytes
from netmoments.network import zoo
from netmoments.network.exported import ExportedNetwork
from netmoments.network.loading import load_network
from netmoments.network.model import NetworkModel, network_of
from netmoments.network.relu_calls import Cut, Relu
from netmoments.precision import full_precision
from netmoments.report.pictures import BLUE, INK, ORANGE, SMALL, new_figure
from reproduction.experiment import Drawing, Outcome, Panel, Settings
from reproduction.plots import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "figure-1"
MNIST_SHAPE = (1, 28, 28)
MOST = 5
"""At most so many ReLUs are drawn; of more, those in the middle are left out."""
INCH = 1 / 15.5
"""The size of a unit in inches; all lengths below are in these units."""
BAR, BOX, DOTS, GAP, EDGE = 1.6, 15.0, 4.0, 1.8, 1.8
LEAST = 23.0
"""The least width of a part of the network."""
ENDS, KEPT = 14.0, 17.0
TOP, BOTTOM, HEIGHT = 25.0, 3.0, 11.0
LETTERS = 13
"""The most letters of a name on one line of a box."""
WASH = {BLUE: "#E4F0F8", ORANGE: "#FBE9DD"}


@dataclass(frozen=True)
class Anatomy:
    """What is drawn of a network."""

    model: str
    relus: tuple[Relu, ...]
    kept: int
    shape: tuple[int, ...]
    """The shape of one input."""
    outputs: int
    around: bool
    """Whether the scores depend on the input through a path around the kept ReLU."""

    @property
    def inputs(self) -> int:
        return prod(self.shape)

    def memory(self, units: int) -> int:
        """q(n + d): the numbers in the two Jacobians of a linearization that keeps a ReLU of q units."""
        return units * (self.inputs + self.outputs)


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
    """The network to draw. One of the zoo's without weights is left untrained, as only its shapes matter."""
    if weights is None and model in zoo.ZOO and zoo.entry(model).shipped is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return zoo.build(model)
    return load_network(model, weights)


def input_shape(model: str, network: nn.Module) -> tuple[int, ...]:
    """The shape of one input: known for the zoo and for exported programs, and otherwise assumed to be MNIST's."""
    if model in zoo.ZOO:
        return zoo.entry(model).input_shape
    if isinstance(network, ExportedNetwork):
        for node in network.program.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
                return tuple(int(size) for size in node.meta["val"].shape[1:])
    return MNIST_SHAPE


def anatomy_of(model: str, network: nn.Module, shape: tuple[int, ...], layer: int | str) -> Anatomy:
    """The network's ReLUs from one run on random pixels, and whether a path goes around the kept one."""
    network = network_of(network, NAME)
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    example = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        found = NetworkModel.of(network, example, NAME)
    except ValueError as error:
        if model in zoo.ZOO or isinstance(network, ExportedNetwork):
            raise
        raise ValueError(
            f"{error}\n{model} was given an image of MNIST's shape, {tuple(shape)}, as nothing says what it takes; "
            f"torch.export.save it as a .pt2 file, which knows its input"
        ) from error
    kept = found.relu(layer)
    around = _goes_around(Cut(network, kept), example)
    name = Path(model).stem if model.endswith(".pt2") else Path(model).name
    return Anatomy(name, found.relus, kept.index, tuple(shape), found.outputs, around)


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


class Span(NamedTuple):
    left: float
    right: float

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2


def shown_relus(count: int, kept: int) -> tuple[list[int | None], list[int | None]]:
    """The ReLUs drawn before the kept one and after it; None where some are left out.

    If there are many, they are the kept one's neighbours or, at an end of the network, its neighbour and the other end.
    """
    chosen = set(range(count))
    if count > MOST:
        chosen = {max(kept - 1, 0), min(kept + 1, count - 1)} | ({0} if kept == count - 1 else set())
        chosen |= {count - 1} if kept == 0 else set()
    before = [-1, *(i for i in sorted(chosen) if i < kept), kept]
    after = [kept, *(i for i in sorted(chosen) if i > kept), count]
    return _with_gaps(before)[1:-1], _with_gaps(after)[1:-1]


def draw_anatomy(anatomy: Anatomy) -> Figure:
    """Draw the network above and the (Affine, ReLU, Affine) below, each part under the one it comes from."""
    before, after = shown_relus(len(anatomy.relus), anatomy.kept)
    source = Span(0, ENDS)
    first = _next(source, max(LEAST, _width(before)))
    middle = _next(first, KEPT)
    last = _next(middle, max(LEAST, _width(after)))
    target = _next(last, ENDS)
    low, high = BOTTOM - (8.0 if anatomy.around else 1.5), TOP + HEIGHT + 9.0
    figure = new_figure((target.right + 2) * INCH, (high - low) * INCH)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-1, target.right + 1), ylim=(low, high))
    axes.axis("off")
    _network_row(axes, anatomy, (source, first, middle, last, target), before, after)
    _linearized_row(axes, anatomy, (source, first, middle, last, target))
    halfway = (TOP + BOTTOM + HEIGHT) / 2
    for part, word in ((first, "linearize at x"), (middle, "kept"), (last, "linearize at x")):
        _arrow(axes, (part.middle, TOP - 1.6), (part.middle, BOTTOM + HEIGHT + 0.6), dashed=True)
        _text(axes, part.middle + 1, halfway, word, style="italic", side="left")
    return figure


def _network_row(
    axes: Axes, anatomy: Anatomy, spans: tuple[Span, ...], before: list[int | None], after: list[int | None]
) -> None:
    source, first, middle, last, target = spans
    kept = anatomy.relus[anatomy.kept]
    centre = TOP + HEIGHT / 2
    _text(
        axes,
        source.left,
        TOP + HEIGHT + 7,
        f"{anatomy.model}: {_relus(len(anatomy.relus))}",
        weight="bold",
        side="left",
    )
    _text(axes, target.right, TOP + HEIGHT + 7, "grey bars: affine layers, pooling", colour=GREY, side="right")
    _box(axes, source, TOP, ("input x", _shape(anatomy.shape), f"n = {anatomy.inputs:,}"))
    for part, shown, name, inside in (
        (first, before, r"$\mathbf{R}_{l-1}$", anatomy.kept),
        (last, after, r"$\mathbf{R}_{l+1}$", len(anatomy.relus) - anatomy.kept - 1),
    ):
        _box(axes, Span(part.left, part.right), TOP - 1.2, (), HEIGHT + 2.4, face="#F7F7F7", edge=GREY, dashed=True)
        _text(axes, part.middle, TOP + HEIGHT + 3.2, f"{name}: {_relus(inside)} inside")
        _chain(axes, anatomy, part, shown)
    lines = (*_name(kept.name), _shape(kept.shape), f"q = {kept.size:,}")
    _box(axes, middle, TOP, lines, headings=len(lines) - 2, face=WASH[ORANGE], edge=ORANGE)
    _text(axes, middle.middle, TOP + HEIGHT + 3.2, rf"ReLU, $l = {anatomy.kept + 1}$", colour=ORANGE, weight="bold")
    _box(axes, target, TOP, ("scores", f"d = {anatomy.outputs:,}"))
    for left, right in pairwise(spans):
        _arrow(axes, (left.right, centre), (right.left, centre))


def _linearized_row(axes: Axes, anatomy: Anatomy, spans: tuple[Span, ...]) -> None:
    source, first, middle, last, target = spans
    kept, centre = anatomy.relus[anatomy.kept], BOTTOM + HEIGHT / 2
    q, n, d = f"{kept.size:,}", f"{anatomy.inputs:,}", f"{anatomy.outputs:,}"
    first, last = (Span(part.middle - LEAST / 2, part.middle + LEAST / 2) for part in (first, last))
    noise = ("noise", r"$x \sim \mathcal{N}(\mu, \Sigma)$")
    _box(axes, source, BOTTOM, noise, face=WASH[BLUE], edge=BLUE)
    _box(axes, first, BOTTOM, (r"affine, $\mathbf{A}x + \mathbf{c}_1$", rf"$\mathbf{{A}}$: {q} × {n}"))
    _box(axes, middle, BOTTOM, ("ReLU", f"{q} units"), face=WASH[ORANGE], edge=ORANGE)
    _box(axes, last, BOTTOM, (r"affine, $\mathbf{B}y + \mathbf{c}_2$", rf"$\mathbf{{B}}$: {d} × {q}"))
    _box(axes, target, BOTTOM, ("mean", "variance", "covariance"), headings=3, face=WASH[BLUE], edge=BLUE)
    for left, right in pairwise((source, first, middle, last, target)):
        _arrow(axes, (left.right, centre), (right.left, centre))
    if anatomy.around:
        low = BOTTOM - 3
        axes.plot([source.middle, source.middle, target.middle], [BOTTOM, low, low], color=GREY, linewidth=1)
        _arrow(axes, (target.middle, low), (target.middle, BOTTOM))
        _text(axes, middle.middle, low - 1.8, rf"paths around the ReLU, $+\,\mathbf{{D}}x$, $\mathbf{{D}}$: {d} × {n}")


def _chain(axes: Axes, anatomy: Anatomy, part: Span, shown: list[int | None]) -> None:
    """Draw affine layers and pooling as grey bars, and ReLUs as boxes."""
    place = part.middle - _width(shown) / 2 + EDGE
    centre = TOP + HEIGHT / 2
    ends: list[float] = []
    for index in _slots(shown):
        if index == "bar":
            _box(axes, Span(place, place + BAR), TOP + 0.8, (), HEIGHT - 1.6, face="#B8B8B8", edge=GREY)
            width = BAR
        elif index is None:
            _text(axes, place + DOTS / 2, centre, "…")
            width = DOTS
        else:
            relu = anatomy.relus[int(index)]
            lines = (*_name(relu.name), _shape(relu.shape), f"{relu.size:,} units")
            _box(axes, Span(place, place + BOX), TOP, lines, headings=len(lines) - 2)
            width = BOX
        if ends:
            _arrow(axes, (ends[-1], centre), (place, centre), head=5)
        ends.append(place + width)
        place += width + GAP
    _arrow(axes, (part.left, centre), (part.middle - _width(shown) / 2 + EDGE, centre), head=0)
    _arrow(axes, (ends[-1], centre), (part.right, centre), head=0)


def _slots(shown: list[int | None]) -> list[int | str | None]:
    slots: list[int | str | None] = ["bar"]
    for index in shown:
        slots += [index] if index is None else [index, "bar"]
    return [*slots, "bar"] if slots[-1] is None else slots


def _width(shown: list[int | None]) -> float:
    widths = [BAR if slot == "bar" else DOTS if slot is None else BOX for slot in _slots(shown)]
    return sum(widths) + GAP * (len(widths) - 1) + 2 * EDGE


def _with_gaps(indices: list[int]) -> list[int | None]:
    found: list[int | None] = []
    for index in indices:
        if found and found[-1] is not None and index > found[-1] + 1:
            found.append(None)
        found.append(index)
    return found


def _next(span: Span, width: float) -> Span:
    return Span(span.right + 4, span.right + 4 + width)


def _relus(count: int) -> str:
    return {0: "no ReLU", 1: "1 ReLU"}.get(count, f"{count} ReLUs")


def _name(name: str) -> tuple[str, ...]:
    """A dotted name on one line if it fits, else on two, each shortened at its beginning if necessary."""
    whole = (name,) if len(name) <= LETTERS or "." not in name else tuple(name.rsplit(".", 1))
    return tuple(part if len(part) <= LETTERS else "…" + part[-LETTERS + 1 :] for part in whole)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _box(
    axes: Axes, span: Span, bottom: float, lines: tuple[str, ...], height: float = HEIGHT, *, headings: int = 1,
    face: str = "white", edge: str = INK, dashed: bool = False,
) -> None:  # fmt: skip
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={min(1.0, (span.right - span.left) / 3)}"
    axes.add_patch(
        FancyBboxPatch(
            (span.left, bottom), span.right - span.left, height, boxstyle=style, facecolor=face, edgecolor=edge,
            linewidth=0.7 if dashed else 1.0, linestyle="--" if dashed else "-",
        )
    )  # fmt: skip
    for place, line in enumerate(lines):
        height_of_line = bottom + height * (1 - (place + 0.5 + 0.25) / (len(lines) + 0.5))
        _text(axes, span.middle, height_of_line, line, weight="bold" if place < headings else "normal")


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, dashed: bool = False, head: float = 7
) -> None:
    from matplotlib.patches import FancyArrowPatch

    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>" if head else "-", mutation_scale=head or 1, shrinkA=0, shrinkB=0, linewidth=1,
            color=GREY if dashed or not head else INK, linestyle="--" if dashed else "-",
        )
    )  # fmt: skip


def _text(axes: Axes, x: float, y: float, text: str, side: str = "center", colour: str = INK, **font: str) -> None:
    axes.text(x, y, text, ha=side, va="center", fontsize=SMALL - 0.5, color=colour, **font)  # type: ignore[arg-type]

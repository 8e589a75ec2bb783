"""`output_moments`, the one way in: what is asked is read once, the network looked at once, and a method answers.

Methods are values, each with its own options:

| method                  | short name    | what it does                                                              |
| ----------------------- | ------------- | ------------------------------------------------------------------------- |
| `Layerwise()`           | `"layerwise"` | the joint distribution of all tensors, layer by layer: the tightest       |
| `Sketch(probes, seed)`  | `"sketch"`    | formulas with the spread of a few samples: networks of any size           |
| `TwoStage(layer, bank)` | `"two-stage"` | linearized before and after one ReLU, as the paper does                   |
| `Linear()`              | `"linear"`    | the delta method: linearized throughout                                   |
| `Sampling(samples, …)`  | `"sampling"`  | Monte Carlo with standard errors, corrected by another method if asked    |
| `Auto()`                | `"auto"`      | exact where the network is, else layerwise where that fits, else a sketch |
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_count
from netmoments.gaussian import Gaussian
from netmoments.linearize.bank import LinearizationBank
from netmoments.linearize.two_stage import linearized, linearized_at, output_indices
from netmoments.memory import DIRECTIONS, PIECE, directions_at_once, gigabytes, memory_limit
from netmoments.moments.result import OutputMoments
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision
from netmoments.propagate.layerwise import layerwise, need_of
from netmoments.propagate.plan import NoRule, plan_of
from netmoments.propagate.sketch import PROBES, sketched
from netmoments.rules.black_box import black_box
from netmoments.sampling.control_variates import (
    LinearSurrogate,
    Surrogate,
    TwoStageSurrogate,
    controlled_monte_carlo,
)
from netmoments.sampling.evaluation import random_seed
from netmoments.sampling.monte_carlo import SampledMoments, monte_carlo

CALLER = "output_moments"
MANY_SCORES, LARGEST = 100, 5
"""Beyond so many scores a sketch follows the largest only, unless told which; and how many of them."""

Choice = int | Sequence[int] | Tensor | None
"""Which scores: indices, (k,) or (N, k); a number k for the k largest at each mean; None for all."""


def output_moments(
    network: Any,
    noise: Gaussian,
    method: Method | str = "auto",
    outputs: Choice = None,
    *,
    memory_budget: int | None = None,
) -> OutputMoments:
    """Mean, variance and covariance of a network's scores when its input is N(mean, covariance).

    Args:
        network: any module in eval mode, an exported program, a `NetworkModel`, or an `AffineReluAffine`, for which all
            is exact. It is run, and never changed by this library.
        noise: the input, with any batch dimensions.
        method: a value such as `Sketch(probes=128)`, or a short name for one with its default options: "layerwise", the
            joint covariance carried through every layer, the tightest; "sketch", for networks of any size; "two-stage",
            as the paper does; "linear", the delta method; "sampling", Monte Carlo with standard errors. "auto" is exact
            where the network is (Affine, ReLU, Affine), else "layerwise" where that fits the memory, else "sketch"; the
            result says which, and why.
        outputs: which scores: a list of indices, or a number k for the k largest at each mean; by default all (for a
            sketch of more than 100, the 5 largest).
        memory_budget: bytes that linearizations or covariances may take at a time, by default half of what is free. A
            sketch takes as many images at a time as fit, at least one: `probes` copies of the network's tensors.

    Where the noise requires a gradient, the mean of the scores has one by "layerwise" and "sketch" (the covariance too
    by "layerwise"), in it and in the network's weights.

    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).eval()
    >>> output_moments(network, Gaussian(torch.zeros(2), std=0.1)).method
    'exact'
    """
    chosen = method_named(method, CALLER)
    if isinstance(network, AffineReluAffine):
        return _of_affine_relu_affine(network, noise, chosen, outputs)
    request = Request.read(network, noise, outputs, memory_budget, CALLER)
    flat = request.model.answer(partial(chosen.moments, request))
    shaped: dict[str, Any] = {}  # one batch dimension back to those of the noise
    for name, value in vars(flat).items():
        if isinstance(value, Tensor):
            shaped[name] = value.reshape((*noise.batch_shape, *value.shape[1:]))
    if outputs is None and flat.mean.shape[-1] == request.model.outputs:
        shaped["outputs"] = None
    return dataclasses.replace(flat, **shaped)


@dataclass(frozen=True, eq=False)
class Request:
    """What a caller wants to know, checked: the moments of chosen scores of a network, for every entry of the noise."""

    model: NetworkModel
    noise: Gaussian
    """As it was given, with any batch dimensions."""
    flat: Gaussian
    """The same with one batch dimension, N entries."""
    outputs: Choice
    memory_budget: int | None

    @classmethod
    def read(cls, network: Any, noise: Any, outputs: Choice, memory_budget: int | None, caller: str) -> Request:
        """Every argument checked once; the network looked at, or known from before."""
        if not isinstance(noise, Gaussian):
            raise TypeError(f"{caller}: noise must be a netmoments.Gaussian, got {describe(noise)}")
        flat = noise.flattened()
        model = NetworkModel.of(network, flat.mean, caller)
        if memory_budget is not None:
            memory_limit(flat.device, memory_budget)
        return cls(model, noise, flat, outputs, memory_budget)

    def indices(self, largest: int | None = None) -> Tensor:
        """Indices (N, k) of the wanted scores; of all, or of the `largest` ones at each mean, where none were named."""
        mean, outputs = self.flat.mean, largest if self.outputs is None else self.outputs
        if outputs is None:
            return torch.arange(self.model.outputs, device=mean.device).expand(len(mean), -1)
        if not isinstance(outputs, int):
            return output_indices(outputs, len(mean), self.model.outputs, CALLER).to(mean.device)
        require_number_of_outputs(CALLER, outputs, self.model.outputs)
        with torch.no_grad(), full_precision():
            return torch.cat([self.model.network(part.clone()).topk(outputs, 1).indices for part in mean.split(64)])

    @contextmanager
    def following_gradients(self) -> Iterator[Gaussian]:
        """The flat noise as autograd may use it; inside, gradients are on exactly if the noise requires one."""
        flat = self.flat
        wanted = flat.mean.requires_grad or flat.covariance.variances().requires_grad
        on = wanted and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(on):
            if flat.mean.is_inference():
                covariance = flat.covariance.to(flat.device, copy=True)
                flat = Gaussian._trusted(flat.mean.clone(), covariance, flat.event_ndim)
            yield flat

    def fitting(self, bytes_each: int) -> int:
        """How many Jacobians, of so many bytes each, are held at a time."""
        limit = memory_limit(self.flat.device, self.memory_budget)
        if self.memory_budget is None:
            limit = min(limit, PIECE.get(self.flat.device.type, PIECE["cpu"])["matrices"])
        return max(1, limit // bytes_each)


def require_number_of_outputs(caller: str, outputs: int, count: int) -> None:
    if isinstance(outputs, bool) or not 1 <= outputs <= count:
        raise ValueError(
            f"{caller}: outputs must be from 1 to the network's {count} scores, or a list of indices, got {outputs}"
        )


class Method(ABC):
    """A way to moments. Methods are frozen dataclasses: their options are their fields."""

    name: ClassVar[str]

    @abstractmethod
    def moments(self, request: Request) -> OutputMoments:
        """The moments (N, k) of every entry of the flat noise."""

    def surrogate(self, request: Request, indices: Tensor, seed: int) -> Surrogate:
        """A function like the network with known moments, for sampling with this seed to be corrected with."""
        raise ValueError(
            f"{CALLER}: control must be one of {', '.join(CONTROLS)}, or None, got {self}; the others have no "
            f"surrogate that samples could be compared with"
        )

    def of_affine_relu_affine(self, network: AffineReluAffine, noise: Gaussian) -> OutputMoments:
        """The moments of a network that is linearized already."""
        raise ValueError(
            f'{CALLER}: an AffineReluAffine is exact with method="auto" or "two-stage"; or take plain "sampling"'
        )


@dataclass(frozen=True)
class Layerwise(Method):
    """The joint distribution of all tensors, as Gaussians with third cumulants, carried through every layer."""

    name: ClassVar[str] = "layerwise"

    def moments(self, request: Request) -> OutputMoments:
        with request.following_gradients() as noise:
            plan, indices = plan_of(request.model, CALLER), request.indices().clone()
            budget = request.memory_budget
            mean, covariance = layerwise(plan, noise.mean, noise.covariance, indices, budget, CALLER)
        return _outcome(self.name, mean, covariance, outputs=indices)


@dataclass(frozen=True)
class Sketch(Method):
    """Formulas at every nonlinear layer, with the spread of `probes` samples; `seed` of these.

    Operations without a rule are known from the samples. Of more than 100 scores the 5 largest are followed unless
    indices are given.
    """

    probes: int = PROBES
    seed: int = 0
    name: ClassVar[str] = "sketch"

    def __post_init__(self) -> None:
        require_count("sketch", "probes", self.probes, least=2)
        require_count("sketch", "seed", self.seed, least=0)

    def moments(self, request: Request) -> OutputMoments:
        with request.following_gradients() as noise:
            plan = plan_of(request.model, CALLER, black_box)
            indices = request.indices(LARGEST if request.model.outputs > MANY_SCORES else None).clone()
            options = {"probes": self.probes, "seed": self.seed, "memory_budget": request.memory_budget}
            found = sketched(plan, noise.mean, noise.covariance, indices, **options)  # type: ignore[arg-type]
        return _outcome(self.name, found.mean, found.covariance, outputs=indices)

    def surrogate(self, request: Request, indices: Tensor, seed: int) -> Surrogate:
        """The expected slopes; from probes that are not among the samples."""
        with torch.inference_mode(False), torch.no_grad():
            plan, noise, own = (
                plan_of(request.model, CALLER, black_box),
                request.flat,
                random_seed(seed, "sketch", self.seed),
            )
            found = sketched(
                plan, noise.mean, noise.covariance, indices,
                probes=self.probes, seed=own, memory_budget=request.memory_budget,
            )  # fmt: skip
        return LinearSurrogate(found.slopes, request.flat)


@dataclass(frozen=True)
class TwoStage(Method):
    """Linearized before and after one ReLU at the noise's mean, with that ReLU exact: the paper's method.

    `layer` is the ReLU, by place in the order of calls (the last by default) or by name, see `relus`. With a `bank` of
    linearizations made beforehand, each input is answered from the nearest point. Entries of the noise that share a
    mean by `mean.expand(...)` share its linearization: several noise levels of one image, say.
    """

    layer: int | str = -1
    bank: LinearizationBank | None = None
    name: ClassVar[str] = "two-stage"

    def __post_init__(self) -> None:
        if self.bank is not None and not isinstance(self.bank, LinearizationBank):
            raise TypeError(f"TwoStage: bank must be a netmoments.LinearizationBank, got {describe(self.bank)}")
        if self.bank is not None and self.layer != -1:
            raise ValueError(f"TwoStage: a bank has its own ReLU; leave out layer, got {self.layer!r}")

    def moments(self, request: Request) -> OutputMoments:
        noise, indices = request.flat, request.indices()
        if self.bank is None:
            answers, others = self._linearizations(request, indices), {"cut": request.model.relu(self.layer).name}
        else:
            answers, others = self._nearest(self.bank, request, indices)
        means, covariances, order = [], [], []
        for network, entries in answers:
            mean, covariance = network.moments(noise.entries(entries))
            means.append(mean)
            covariances.append(covariance)
            order.append(entries)
        back = torch.cat(order).argsort()
        return _outcome(self.name, torch.cat(means)[back], torch.cat(covariances)[back], outputs=indices, **others)

    def _linearizations(self, request: Request, indices: Tensor) -> Iterator[tuple[AffineReluAffine, Tensor]]:
        """Linearizations at the means, some at a time, with the entries of the noise that each is for."""
        model, noise = request.model, request.flat
        origin, first = _shared_means(request.noise, indices)
        points, chosen = noise.mean[first].detach(), indices[first]
        units = model.relu(self.layer).shape.numel()
        each = units * noise.size + indices.shape[1] * (units + noise.size)
        together = request.fitting(each * noise.dtype.itemsize)
        for start in range(0, len(points), together):
            span = slice(start, start + together)
            group = linearized_at(model, points[span], self.layer, chosen[span], request.memory_budget)
            count = len(group.c1)
            mine = ((origin >= start) & (origin < start + count)).nonzero().squeeze(1)
            mine = mine[origin[mine].argsort(stable=True)]
            levels = (origin[mine] - start).bincount(minlength=count).unique()
            if len(levels) == 1:  # as many entries for each: all their first ones together, all their second, …
                for entries in mine.reshape(count, -1).unbind(1):
                    yield group, entries
            else:
                for number in range(count):
                    yield group.entries(number), mine[origin[mine] == start + number]

    def _nearest(
        self, bank: LinearizationBank, request: Request, indices: Tensor
    ) -> tuple[Iterator[tuple[AffineReluAffine, Tensor]], dict[str, Any]]:
        """The bank's linearizations with the entries that each is nearest to, and what the result says of it."""
        of_bank = bank.networks.B.shape[-2]
        if of_bank != request.model.outputs:
            raise ValueError(
                f"{CALLER}: the bank is of another network: its linearizations have {of_bank} scores, the network "
                f"{request.model.outputs}"
            )
        nearest, distance = bank.nearest(request.flat.mean)
        pairs = ((bank.member(int(number)), (nearest == number).nonzero().squeeze(1)) for number in nearest.unique())
        answers = ((network.outputs(indices[entries]), entries) for network, entries in pairs)
        return answers, {"cut": bank.relu, "distance": distance}

    def surrogate(self, request: Request, indices: Tensor, seed: int) -> Surrogate:
        """The linearization itself, whose moments are exact."""
        points = request.flat.mean.detach()
        flat = linearized_at(request.model, points, self.layer, indices, request.memory_budget)
        return TwoStageSurrogate(flat, request.flat)

    def of_affine_relu_affine(self, network: AffineReluAffine, noise: Gaussian) -> OutputMoments:
        return _outcome("exact", network.mean(noise), network.covariance(noise))


@dataclass(frozen=True)
class Linear(Method):
    """The delta method: E g ≈ g(mean), Cov g ≈ J Σ Jᵀ with the Jacobian J at the mean."""

    name: ClassVar[str] = "linear"

    def moments(self, request: Request) -> OutputMoments:
        indices, means, covariances = request.indices(), [], []
        for mean, jacobian, span in _linearizations(request, indices):
            means.append(mean)
            covariances.append(request.flat.covariance.entries(span).push(jacobian))
        return _outcome(self.name, torch.cat(means), torch.cat(covariances), outputs=indices)

    def surrogate(self, request: Request, indices: Tensor, seed: int) -> Surrogate:
        """The derivative at the mean."""
        slopes = torch.cat([jacobian for _, jacobian, _ in _linearizations(request, indices)])
        return LinearSurrogate(slopes, request.flat)


@dataclass(frozen=True)
class Sampling(Method):
    """Monte Carlo on the network itself, with standard errors.

    `control` is the method that gives a control variate: `Sketch()`, `TwoStage()` or `Linear()`, or their short names.
    The estimates stay unbiased, and their errors become smaller the better the two agree.
    """

    samples: int = 10_000
    control: Method | str | None = None
    seed: int = 0
    name: ClassVar[str] = "sampling"

    def __post_init__(self) -> None:
        require_count("Sampling", "samples", self.samples, least=2)
        require_count("Sampling", "seed", self.seed, least=0)
        control = SHORT_NAMES.get(self.control) if isinstance(self.control, str) else self.control
        if isinstance(control, Method) and type(control).surrogate is not Method.surrogate:
            object.__setattr__(self, "control", control)
        elif self.control is not None:
            raise ValueError(
                f"{CALLER}: control must be one of {', '.join(CONTROLS)}, or None, or a method with options such as "
                f"netmoments.Sketch(), got {self.control!r}"
            )

    def moments(self, request: Request) -> OutputMoments:
        noise, indices = request.flat, request.indices()
        scores = _chosen_scores(request, indices)
        if self.control is None:
            sampled = monte_carlo(scores, noise, self.samples, seed=self.seed)
        else:
            assert isinstance(self.control, Method)
            surrogate = self.control.surrogate(request, indices, self.seed)
            sampled = controlled_monte_carlo(scores, noise, surrogate, self.samples, seed=self.seed)
        return _with_errors(sampled, indices)

    def of_affine_relu_affine(self, network: AffineReluAffine, noise: Gaussian) -> OutputMoments:
        if self.control is not None:
            return super().of_affine_relu_affine(network, noise)
        return _with_errors(monte_carlo(network, noise, self.samples, seed=self.seed), None)


@dataclass(frozen=True)
class Auto(Method):
    """Exact where the network is (Affine, ReLU, Affine), else layerwise where that fits the memory, else a sketch."""

    name: ClassVar[str] = "auto"

    def moments(self, request: Request) -> OutputMoments:
        name, reason = self.choice(request)
        chosen = Sketch() if name == "sketch" else Layerwise()
        return dataclasses.replace(chosen.moments(request), method=name, reason=reason)

    def choice(self, request: Request) -> tuple[str, str]:
        """The method that is taken, or "exact" for a layerwise answer that is, and why, in words."""
        try:
            with request.following_gradients():
                plan = plan_of(request.model, CALLER)
        except NoRule as error:
            what = str(error).removeprefix(f"{CALLER}: ").split(" as it is called")[0]
            return "sketch", f"there is {what}"
        noise = request.flat
        need = need_of(plan, noise.covariance.rank, noise.dtype.itemsize)
        limit = memory_limit(noise.device, request.memory_budget)
        if not plan.last.sources:
            return "exact", "the scores do not depend on the input"
        size = f"{gigabytes(need.bytes)} (at {need.layer}) of the {gigabytes(limit)} there are for it"
        if need.bytes > limit:
            return "sketch", f"the joint covariance of all layers would take {size}"
        if not plan.stages:
            return "exact", "the network is affine"
        if len(plan.stages) == 1 and plan.stages[0].rule.is_exact and plan.stages[0].rule.has_pairs:
            return "exact", f"the only nonlinear layer is {plan.stages[0].name}, which is piecewise linear"
        return "layerwise", f"the joint covariance of all layers takes {size}"

    def of_affine_relu_affine(self, network: AffineReluAffine, noise: Gaussian) -> OutputMoments:
        return TwoStage().of_affine_relu_affine(network, noise)


SHORT_NAMES: dict[str, Method] = {
    method.name: method for method in (Auto(), Layerwise(), Sketch(), TwoStage(), Linear(), Sampling())
}
CONTROLS = ("two-stage", "linear", "sketch")


def method_named(method: Any, caller: str) -> Method:
    """A method as given, or the one that a short name stands for, with its default options."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str) and method in SHORT_NAMES:
        return SHORT_NAMES[method]
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"{caller}: method must be a value, got the class {method.__name__}; write {method.__name__}()")
    raise ValueError(
        f"{caller}: method must be one of {', '.join(SHORT_NAMES)}, or a method with options such as "
        f"netmoments.Sketch(probes=128), got {method!r}"
    )


def _outcome(method: str, mean: Tensor, covariance: Tensor, **others: Any) -> OutputMoments:
    return OutputMoments(mean, covariance.diagonal(dim1=-2, dim2=-1), covariance, method=method, **others)


def _with_errors(sampled: SampledMoments, outputs: Tensor | None) -> OutputMoments:
    errors = {name: getattr(sampled, name) for name in ("mean", "variance", "covariance")}
    errors |= {f"{name}_standard_error": getattr(sampled, f"{name}_standard_error") for name in tuple(errors)}
    return OutputMoments(**errors, method="sampling", outputs=outputs)


def _chosen_scores(request: Request, indices: Tensor) -> Callable[[Tensor], Tensor]:
    """The scores (N, k) of each of N images, for samples of all of them in turn."""
    network, images = request.model.network, len(indices)

    def chosen(x: Tensor) -> Tensor:
        scores = network(x)
        picked = scores.reshape(-1, images, scores.shape[1]).gather(2, indices.expand(len(x) // images, -1, -1))
        return picked.reshape(len(x), -1)

    return chosen


def _linearizations(request: Request, indices: Tensor) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Scores (·, k) and Jacobians (·, k, n) at the means, some at a time, with the entries they are for."""
    model, noise = request.model, request.flat
    model.require_linearizable()
    itemsize, budget = noise.dtype.itemsize, request.memory_budget
    together = max(1, directions_at_once(noise.device, model.largest, itemsize, budget) // DIRECTIONS)
    together = min(together, request.fitting(indices.shape[1] * noise.size * itemsize))
    working = directions_at_once(noise.device, model.largest * together, itemsize, budget)
    for start in range(0, len(noise.mean), together):
        span = slice(start, start + together)
        yield (*linearized(model.network, noise.mean[span], indices[span], working), span)


def _shared_means(noise: Gaussian, indices: Tensor) -> tuple[Tensor, Tensor]:
    """For every entry of the flattened noise a number, 0, 1, …: one for those of an expanded mean and equal scores.

    And the first entry that has each number.
    """
    mean = noise.mean
    own = [1 if mean.stride(dim) == 0 else mean.shape[dim] for dim in range(mean.dim() - noise.event_ndim)]
    numbers = torch.arange(math.prod(own), device=noise.device).reshape(own)
    each = numbers.expand(noise.batch_shape).reshape(-1, 1)
    found, origin = torch.cat([each, indices], 1).unique(dim=0, return_inverse=True)
    places = torch.arange(len(origin), device=origin.device)
    first = places.new_full((len(found),), len(origin)).scatter_reduce_(0, origin, places, "amin")
    return origin, first


def _of_affine_relu_affine(network: AffineReluAffine, noise: Any, method: Method, outputs: Choice) -> OutputMoments:
    """The same for a network that is linearized already, with the chosen scores only."""
    if not isinstance(noise, Gaussian):
        raise TypeError(f"{CALLER}: noise must be a netmoments.Gaussian, got {describe(noise)}")
    if outputs is None:
        return method.of_affine_relu_affine(network, noise)
    count = network.B.shape[-2]
    if isinstance(outputs, int):
        require_number_of_outputs(CALLER, outputs, count)
        with torch.no_grad():
            indices = network(noise.flat_mean).topk(outputs, -1).indices
    else:
        indices = output_indices(outputs, 1, count, CALLER).squeeze(0)
    result = method.of_affine_relu_affine(network.outputs(indices), noise)
    return dataclasses.replace(result, outputs=indices.to(noise.device).expand(result.mean.shape))

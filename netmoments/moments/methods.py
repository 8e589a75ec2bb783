"""Ways to moments, as values: each has its own options, and answers a request.

| method                  | short name    | what it does                                                              |
| ----------------------- | ------------- | ------------------------------------------------------------------------- |
| `Layerwise()`           | `"layerwise"` | the joint distribution of all tensors, layer by layer: the tightest       |
| `Sketch(probes, seed)`  | `"sketch"`    | formulas with the spread of a few samples: networks of any size           |
| `TwoStage(layer, bank)` | `"two-stage"` | linearized before and after one ReLU, as the paper does                   |
| `Linear()`              | `"linear"`    | the delta method: linearized throughout                                   |
| `Sampling(samples, …)`  | `"sampling"`  | Monte Carlo with standard errors, corrected by another method if asked    |
| `Auto(tolerance, …)`    | `"auto"`      | exact where the network is, else controlled samples until it is met       |
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, random_seed, require_count, require_finite, require_positive, require_seed
from netmoments.gaussian import Gaussian
from netmoments.linearize.bank import LinearizationBank
from netmoments.linearize.two_stage import linearized_at, linearized_in_groups, scores_and_jacobians
from netmoments.memory import elements_together, gigabytes, matrices_together, memory_limit, points_together
from netmoments.moments.request import CALLER, Request
from netmoments.moments.result import SAMPLED, MomentErrors, OutputMoments
from netmoments.propagate.layerwise import layerwise, need_of
from netmoments.propagate.plan import NoRule, plan_of
from netmoments.propagate.sketch import PROBES, sketched
from netmoments.rules.black_box import black_box
from netmoments.sampling.adaptive import Goal, SampledToGoal, sampled_plainly, sampled_to_tolerance
from netmoments.sampling.control_variates import (
    LinearSurrogate,
    Surrogate,
    TwoStageSurrogate,
    controlled_monte_carlo,
    controlled_variances,
)
from netmoments.sampling.cross_fit import LEAST_SAMPLES
from netmoments.sampling.estimate import PILOT
from netmoments.sampling.monte_carlo import SampledMoments, monte_carlo

TOLERANCE = 0.01
MOST_SAMPLES = 10**8
"""Of each input, however small the tolerance."""


_variances = partial(torch.diagonal, dim1=-2, dim2=-1)
"""Those in covariances (..., k, k), (..., k)."""


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
    """The joint distribution of all tensors, as Gaussians with cumulants beyond, carried through every layer.

    Covariances are squares where these fit (see `netmoments.propagate.layerwise`), else products of rows. Of k chosen
    scores: means (*batch, k) and covariances (*batch, k, k), with derivatives in the noise and in the weights. Exact
    for (Affine, ReLU, Affine). Elsewhere layers are taken as nearly Gaussian: the error is of second order in how far
    they are from that, vanishes with the noise, and grows with depth. Sources: docs/theory/layerwise.md.

    >>> from netmoments import output_moments
    >>> layers = [torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)]
    >>> network, noise = torch.nn.Sequential(*layers).eval(), Gaussian(torch.zeros(5, 2), std=0.1)
    >>> output_moments(network, noise, Layerwise()).covariance.shape
    torch.Size([5, 3, 3])
    """

    name: ClassVar[str] = "layerwise"

    def moments(self, request: Request) -> OutputMoments:
        with request.following_gradients() as noise:
            indices, plan, entries = request.indices(), plan_of(request.model), len(noise.mean)
            wanted, parts = request.products(indices.shape[1]), []
            together = entries if wanted else elements_together("backward", noise.mean, indices.shape[1] ** 2)
            for start in range(0, entries, together):
                span = slice(start, start + together)
                mean, covariance = layerwise(
                    plan, noise.mean[span], noise.covariance.entries(span), indices[span],
                    request.model.memory_budget, request.model.caller, request.model.look,
                )  # fmt: skip
                parts.append((mean, covariance if wanted else _variances(covariance).clone()))
        mean, second = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return _moments(mean, second, self.name, indices)


@dataclass(frozen=True)
class Sketch(Method):
    """Formulas at every nonlinear layer, with the spread of `probes` samples; `seed` of these.

    Operations without a rule are known from the samples. Every output costs a backward pass. Shapes are those of
    `Layerwise`. Exact as the noise vanishes; the spread s of a layer's inputs is known to 1/√(2·probes) of itself,
    which is most of the error. For networks of any size. Sources: docs/theory/sketch.md.

    >>> from netmoments import output_moments
    >>> layers = [torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)]
    >>> network, noise = torch.nn.Sequential(*layers).eval(), Gaussian(torch.zeros(5, 2), std=0.1)
    >>> output_moments(network, noise, Sketch(probes=128), check=0).mean.shape
    torch.Size([5, 3])
    """

    probes: int = PROBES
    seed: int = 0
    name: ClassVar[str] = "sketch"

    def __post_init__(self) -> None:
        require_count("sketch", "probes", self.probes, least=2)
        require_seed("sketch", self.seed)

    def moments(self, request: Request) -> OutputMoments:
        with request.following_gradients() as noise:
            indices = request.indices()
            plan = plan_of(request.model, black_box)
            found = sketched(
                plan, noise.mean, noise.covariance, indices,
                probes=self.probes, seed=self.seed, memory_budget=request.model.memory_budget,
            )  # fmt: skip
        return _moments(found.mean, found.covariance, self.name, indices)

    def surrogate(self, request: Request, indices: Tensor, seed: int) -> Surrogate:
        """The expected slopes; from probes that are not among the samples."""
        with torch.inference_mode(False), torch.no_grad():
            plan, noise, own = (
                plan_of(request.model, black_box),
                request.flat,
                random_seed(seed, "sketch", self.seed),
            )
            found = sketched(
                plan, noise.mean, noise.covariance, indices,
                probes=self.probes, seed=own, memory_budget=request.model.memory_budget,
            )  # fmt: skip
        require_finite(
            CALLER, "the sketch that samples are compared with (take another control, or none)", found.slopes
        )
        return LinearSurrogate(found.slopes, request.flat)


@dataclass(frozen=True)
class TwoStage(Method):
    """Linearized before and after one ReLU at the noise's mean, with that ReLU exact: the paper's method.

    `layer` is the ReLU, by place in the order of calls (the last by default) or by name, see `relus`. With a `bank` of
    linearizations made beforehand, each input is answered from the nearest point. Entries of the noise that share a
    mean by `mean.expand(...)` share its linearization: several noise levels of one image, say. Exact for (Affine, ReLU,
    Affine); else the error is that of a first-order Taylor step. Sources: docs/theory/two-stage.md.

    >>> from netmoments import output_moments
    >>> hidden = [torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.ReLU()]
    >>> network = torch.nn.Sequential(*hidden, torch.nn.Linear(4, 3)).eval()
    >>> noise = Gaussian(torch.zeros(2), std=0.1)
    >>> output_moments(network, noise, TwoStage(layer=0)).cut
    '1'
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
        noise, indices, distance = request.flat, request.indices(), None
        if self.bank is None:
            networks = self._networks_with_entries(request, indices)
        else:
            networks, distance = self._nearest_with_entries(self.bank, request, indices)
        means, seconds, order, wanted = [], [], [], request.products(indices.shape[1])
        for network, entries in networks:
            own = noise.mean.flatten(1)[entries], noise.covariance.entries(entries)
            mean, covariance = network.moments(*own)
            means.append(mean)
            seconds.append(covariance if wanted else _variances(covariance).clone())
            order.append(entries)
        back = torch.cat(order).argsort()
        cut = request.model.relu(self.layer).name if self.bank is None else self.bank.relu
        return _moments(torch.cat(means)[back], torch.cat(seconds)[back], self.name, indices, cut, distance)

    def _networks_with_entries(self, request: Request, indices: Tensor) -> Iterator[tuple[AffineReluAffine, Tensor]]:
        """The network linearized at some of the means at a time, with the entries of the noise that it answers: one for
        each of several means, or all that share one mean.
        """
        model, noise = request.model, request.flat
        origin, first = _shared_means(request.noise, indices)
        points, chosen = noise.mean[first].detach(), indices[first]
        for start, group in linearized_in_groups(model, points, self.layer, chosen):
            count = len(group.c1)
            mine = ((origin >= start) & (origin < start + count)).nonzero().squeeze(1)
            mine = mine[origin[mine].argsort(stable=True)]
            sharing = (origin[mine] - start).bincount(minlength=count).unique()
            if len(sharing) == 1:  # as many entries for each: all their first ones together, all their second, …
                for entries in mine.reshape(count, -1).unbind(1):
                    yield group, entries
            else:
                for number in range(count):
                    yield group.entries(number), mine[origin[mine] == start + number]

    def _nearest_with_entries(
        self, bank: LinearizationBank, request: Request, indices: Tensor
    ) -> tuple[Iterator[tuple[AffineReluAffine, Tensor]], Tensor]:
        """The bank's linearizations with the entries that each is nearest to, and how far away these are, (N,)."""
        of_bank = bank.networks.B.shape[-2]
        if of_bank != request.model.outputs:
            raise ValueError(
                f"{CALLER}: the bank is of another network: its linearizations have {of_bank} scores, the network "
                f"{request.model.outputs}"
            )
        nearest, distance = bank.nearest(request.flat.mean)
        members = ((bank.member(int(number)), (nearest == number).nonzero().squeeze(1)) for number in nearest.unique())
        return ((network.outputs(indices[entries]), entries) for network, entries in members), distance

    def surrogate(self, request: Request, indices: Tensor, seed: int) -> Surrogate:
        """The linearization itself, whose moments are exact."""
        points = request.flat.mean.detach()
        flat = linearized_at(request.model, points, self.layer, indices)
        return TwoStageSurrogate(flat, request.flat)

    def of_affine_relu_affine(self, network: AffineReluAffine, noise: Gaussian) -> OutputMoments:
        covariance = network.covariance(noise)
        return _exact(OutputMoments(network.mean(noise), _variances(covariance), covariance, "exact"))


@dataclass(frozen=True)
class Linear(Method):
    """The delta method: E g ≈ g(mean), Cov g ≈ J Σ Jᵀ with the Jacobian J (k, n) at the mean.

    A backward pass a score. Exact for affine networks; else a Taylor step, whose relative error vanishes with the noise
    where no ReLU is at its kink.

    >>> from netmoments import output_moments
    >>> network = torch.nn.Linear(2, 1, bias=False)
    >>> network.weight.data = torch.tensor([[3.0, 4.0]])
    >>> output_moments(network.eval(), Gaussian(torch.ones(2), std=1.0), Linear()).variance
    tensor([25.])
    """

    name: ClassVar[str] = "linear"

    def moments(self, request: Request) -> OutputMoments:
        indices, means, seconds = request.indices(), [], []
        wanted = request.products(indices.shape[1])
        for mean, jacobian, span in _jacobians(request, indices):
            covariance = request.flat.covariance.entries(span)
            means.append(mean)
            seconds.append(covariance.push(jacobian) if wanted else covariance.push_diagonal(jacobian))
        return _moments(torch.cat(means), torch.cat(seconds), self.name, indices)

    def surrogate(self, request: Request, indices: Tensor, seed: int) -> Surrogate:
        """The derivative at the mean."""
        slopes = torch.cat([jacobian for _, jacobian, _ in _jacobians(request, indices)])
        return LinearSurrogate(slopes, request.flat)


@dataclass(frozen=True)
class Sampling(Method):
    """Monte Carlo on the network itself, with standard errors.

    `control` is the method that gives a control variate: `Sketch()`, `TwoStage()` or `Linear()`, or their short names.
    The estimates stay unbiased, and their errors become smaller the better the two agree: as 1/√samples, and with the
    control as √(1 − R²), R² the share of the variance that it explains. Sources: docs/theory/control-variates.md.

    >>> from netmoments import output_moments
    >>> layers = [torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)]
    >>> network, noise = torch.nn.Sequential(*layers).eval(), Gaussian(torch.zeros(5, 2), std=0.1)
    >>> found = output_moments(network, noise, Sampling(1000, control=Sketch()))
    >>> found.samples, found.error.mean.shape
    (1000, torch.Size([5, 3]))
    """

    samples: int = 10_000
    control: Method | str | None = None
    seed: int = 0
    name: ClassVar[str] = SAMPLED

    def __post_init__(self) -> None:
        require_count("Sampling", "samples", self.samples, least=2)
        require_seed("Sampling", self.seed)
        control = SHORT_NAMES.get(self.control) if isinstance(self.control, str) else self.control
        if isinstance(control, Method) and type(control).surrogate is not Method.surrogate:
            object.__setattr__(self, "control", control)
            require_count("Sampling with a control", "samples", self.samples, least=LEAST_SAMPLES)
        elif self.control is not None:
            raise ValueError(
                f"{CALLER}: control must be one of {', '.join(CONTROLS)}, or None, or a method with options such as "
                f"netmoments.Sketch(), got {self.control!r}"
            )

    def moments(self, request: Request) -> OutputMoments:
        noise, indices = request.flat, request.indices()
        if self.control is None and not request.products(indices.shape[1]):
            with request.following_gradients():
                found = sampled_plainly(request.model, noise, indices, self.samples, seed=self.seed)
            return _sampled(found, indices, torch.float64)
        scores, together = _ChosenScores(request, indices), _samples_together(request)
        if self.control is None:
            sampled = monte_carlo(scores, noise, self.samples, seed=self.seed, batch=together)
        else:
            assert isinstance(self.control, Method)
            surrogate = self.control.surrogate(request, indices, self.seed)
            if not request.products(indices.shape[1]):
                alone = controlled_variances(scores, noise, surrogate, self.samples, seed=self.seed, batch=together)
                errors = MomentErrors(alone.mean_standard_error, alone.variance_standard_error)
                return OutputMoments(
                    alone.mean, alone.variance, None, self.name, outputs=indices, error=errors, samples=self.samples,
                    wins=scores.wins / self.samples,
                )  # fmt: skip
            sampled = controlled_monte_carlo(scores, noise, surrogate, self.samples, seed=self.seed, batch=together)
        return dataclasses.replace(_with_errors(sampled, indices), wins=scores.wins / self.samples)

    def of_affine_relu_affine(self, network: AffineReluAffine, noise: Gaussian) -> OutputMoments:
        if self.control is not None:
            return super().of_affine_relu_affine(network, noise)
        return _with_errors(monte_carlo(network, noise, self.samples, seed=self.seed), None)


@dataclass(frozen=True)
class Auto(Method):
    """Exact where the network is (Affine, ReLU, Affine) of up to 2,048 units, else as many samples as it needs.

    `tolerance` is the error of means in standard deviations of the output, with variances to √2 times that relative,
    averaged over the outputs; `samples` (of each input) and `seconds` are limits. The same seed gives the same samples,
    and answers that are the same to rounding: batches are as large as is fastest on a machine. Where low precision is
    faster there, and corrected, they are the same to their errors (`reason` says so). Where the noise requires a
    gradient, the answer is layerwise where that fits the memory, else a sketch. Unbiased; what was reached is in the
    result. Sources: docs/theory/control-variates.md.

    >>> from netmoments import output_moments
    >>> layers = [torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)]
    >>> network, noise = torch.nn.Sequential(*layers).eval(), Gaussian(torch.zeros(5, 2), std=0.1)
    >>> found = output_moments(network, noise, Auto(tolerance=0.03))
    >>> found.met, bool((found.reached <= 0.03).all())
    (True, True)
    """

    tolerance: float = TOLERANCE
    samples: int | None = None
    seconds: float | None = None
    seed: int = 0
    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        require_positive(CALLER, "tolerance", self.tolerance, f"{TOLERANCE}")
        if self.seconds is not None:
            require_positive(CALLER, "seconds", self.seconds, "10")
        if self.samples is not None:
            require_count("Auto", "samples", self.samples, least=20)
        require_seed("Auto", self.seed)

    def moments(self, request: Request) -> OutputMoments:
        model = request.model
        may_be_exact = len(model.relus) <= 1 and not model.smooth and not model.reads_values
        if request.wants_gradient or may_be_exact:  # only then is the network's graph looked at
            name, reason = self._formula(request)
            if request.wants_gradient or name == "exact":
                chosen = Sketch() if name == "sketch" else Layerwise()
                computed = dataclasses.replace(chosen.moments(request), method=name, reason=reason)
                return _exact(computed) if name == "exact" else computed
        indices = request.indices()
        most = self.samples or min(MOST_SAMPLES, max(3 * PILOT, math.ceil(self.tolerance**-2)))
        goal = Goal(float(self.tolerance), most, self.seconds)
        products = request.products(indices.shape[1])
        chosen_outputs = None if request.outputs is None else indices
        found = sampled_to_tolerance(
            request.model, request.flat, chosen_outputs, goal, seed=self.seed, products=products
        )
        return dataclasses.replace(
            _sampled(found, indices, request.flat.dtype), tolerance=self.tolerance, reason=found.description
        )

    def _formula(self, request: Request) -> tuple[str, str]:
        """The formula that fits, "exact" for a layerwise answer that is, and why, in words."""
        try:
            with request.following_gradients():
                plan = plan_of(request.model)
        except NoRule as error:
            what = str(error).removeprefix(f"{request.model.caller}: ").split(" as it is called")[0]
            return "sketch", f"there is {what}"
        except ValueError:  # no fixed graph
            return "sketch", "the network does not always do the same operations"
        noise = request.flat
        scores = request.model.outputs if request.outputs is None else request.indices().shape[1]
        need = need_of(plan, noise.covariance.rank, noise.dtype.itemsize, scores)
        limit = memory_limit(noise.device, request.model.memory_budget)
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
CONTROLS = tuple(name for name, method in SHORT_NAMES.items() if type(method).surrogate is not Method.surrogate)
"""The methods that samples can be corrected with."""


def method_named(method: Any, caller: str, **limits: float | None) -> Method:
    """A method as given, or the one that a short name stands for, with its default options.

    `limits` are the tolerance, samples and seconds of a call, which only "auto" has; None where the caller gave none.
    """
    given = {name: value for name, value in limits.items() if value is not None}
    chosen = SHORT_NAMES.get(method) if isinstance(method, str) else method
    if isinstance(chosen, Auto) and given:
        return dataclasses.replace(chosen, **given)  # type: ignore[arg-type]
    if isinstance(chosen, Method) and given:
        raise ValueError(
            f'{caller}: {next(iter(given))}= is for method="auto", got {chosen}; formulas are as exact as they are, '
            f"and Sampling(samples) takes as many as it is told"
        )
    if isinstance(chosen, Method):
        return chosen
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"{caller}: method must be a value, got the class {method.__name__}; write {method.__name__}()")
    raise ValueError(
        f"{caller}: method must be one of {', '.join(SHORT_NAMES)}, or a method with options such as "
        f"netmoments.Sketch(probes=128), got {method!r}"
    )


def _moments(
    mean: Tensor,
    second: Tensor,
    method: str,
    outputs: Tensor,
    cut: str | None = None,
    distance: Tensor | None = None,
) -> OutputMoments:
    """The answer of a formula, from covariances (N, k, k), or from variances (N, k) where no more was wanted."""
    covariance = second if second.dim() == 3 else None
    return OutputMoments(
        mean, second if covariance is None else _variances(covariance), covariance, method, cut, outputs, distance
    )


def _exact(found: OutputMoments) -> OutputMoments:
    """With errors of 0: exact to rounding."""
    matrix = None if found.covariance is None else torch.zeros_like(found.covariance)
    errors = MomentErrors(torch.zeros_like(found.mean), torch.zeros_like(found.variance), matrix)
    return dataclasses.replace(found, error=errors)


def _sampled(found: SampledToGoal, indices: Tensor, dtype: torch.dtype) -> OutputMoments:
    estimate = found.estimate
    products = estimate.second.dim() == 3
    errors = MomentErrors(
        estimate.mean_error_squared.sqrt().to(dtype),
        estimate.variance_error_squared.sqrt().to(dtype),
        estimate.second_error_squared.sqrt().to(dtype) if products else None,
    )
    return OutputMoments(
        estimate.mean.to(dtype),
        estimate.variance.to(dtype),
        estimate.second.to(dtype) if products else None,
        SAMPLED,
        outputs=indices,
        error=errors,
        samples=int(found.samples.double().mean()),
        reached=found.reached,
        stopped=found.stopped,
        wins=found.wins,
    )


def _samples_together(request: Request) -> int | None:
    """How many samples of every entry go through the network at a time within the caller's memory; None without one."""
    mean, model = request.flat.mean, request.model
    if model.memory_budget is None:
        return None
    return max(1, elements_together("backward", mean, model.pass_size, model.memory_budget) // len(mean))


def _with_errors(sampled: SampledMoments, outputs: Tensor | None) -> OutputMoments:
    errors = MomentErrors(
        sampled.mean_standard_error, sampled.variance_standard_error, sampled.covariance_standard_error
    )
    return OutputMoments(
        sampled.mean, sampled.variance, sampled.covariance, SAMPLED, outputs=outputs, error=errors,
        samples=sampled.samples,
    )  # fmt: skip


class _ChosenScores:
    """The scores (N, k) of each of N images, for samples of all of them in turn; and how often each was the largest."""

    def __init__(self, request: Request, indices: Tensor) -> None:
        self.network, self.indices = request.model.network, indices
        self.wins = torch.zeros(indices.shape, dtype=torch.float64, device=indices.device)

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.network(x)
        images = len(self.indices)
        picked = scores.reshape(-1, images, scores.shape[1]).gather(2, self.indices.expand(len(x) // images, -1, -1))
        self.wins += torch.nn.functional.one_hot(picked.argmax(-1), picked.shape[-1]).sum(0)
        return picked.reshape(len(x), -1)


def _jacobians(request: Request, indices: Tensor) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Scores (·, k) and Jacobians (·, k, n) at the means, some at a time, with the entries they are for."""
    model, noise = request.model, request.flat
    model.require_linearizable()
    held = indices.shape[1] * noise.size
    most = min(model.most_images, matrices_together(noise.mean, held, model.memory_budget))
    together, working = points_together(noise.mean, model.pass_size, most, model.memory_budget)
    for start in range(0, len(noise.mean), together):
        span = slice(start, start + together)
        yield (*scores_and_jacobians(model.network, noise.mean[span], indices[span], working), span)


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

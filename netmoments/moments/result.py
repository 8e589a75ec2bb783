"""What comes out of the front door: moments of the chosen scores, and what follows from them."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netmoments.checks import describe
from netmoments.files import printable
from netmoments.moments.contests import losing_probability, winning_probabilities
from netmoments.network.interface import OutputPart
from netmoments.sampling.monte_carlo import SampledMoments, relative_difference


@dataclass(frozen=True, eq=False)
class MomentErrors:
    """One standard error of each number: means and variances (*batch, *output), covariances (*batch, D, D)."""

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None


SAMPLED = "sampling"
"""The `method` of moments that are estimates from samples."""


@dataclass(frozen=True, eq=False, repr=False)
class OutputMoments:
    """Mean, variance and covariance of a network's outputs under noise, how they were computed, and how far to trust
    them.

    Shapes: (*batch, *output), the output's own shape, or (*batch, k) for k chosen outputs; covariance (*batch, D, D).
    Print it for a table.

    >>> from netmoments import Gaussian, output_moments
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
    >>> moments = output_moments(network, Gaussian(torch.zeros(2), std=0.1))
    >>> moments.mean.shape, moments.covariance.shape, moments.method
    (torch.Size([2]), torch.Size([2, 2]), 'exact')
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    """None for more than 100 outputs, unless it was asked for."""
    method: str
    cut: str | None = None
    """The ReLU that was kept, for method "two-stage"."""
    outputs: Tensor | None = None
    """Which outputs these are, (*batch, k); None if all."""
    distance: Tensor | None = None
    """How far the point of linearization was from the input, for a bank, (*batch)."""
    error: MomentErrors | None = None
    """Standard errors: of samples; for a formula, how far it is from a few hundred of them, and their own. 0 is exact
    to rounding, None was not checked."""
    reason: str | None = None
    """Why this method, where `method="auto"` chose it."""
    samples: int = 0
    """Runs of the network for each input, on average."""
    seconds: float = 0.0
    tolerance: float | None = None
    """What was asked for, where it was."""
    reached: Tensor | None = None
    """What was reached, (*batch): errors of means in standard deviations and of variances relative to √2 times them,
    averaged over the outputs, the larger of both."""
    stopped: str | None = None
    """The limit that ended the sampling before the tolerance was met."""
    wins: Tensor | None = None
    """How often each output was the largest among the samples, (*batch, k)."""
    output_ndim: int = 1
    """How many trailing dimensions of the mean are the output of one input."""
    parts: tuple[OutputPart, ...] = ()
    """What the outputs are by name and shape, where the network returns several tensors."""

    @property
    def met(self) -> bool:
        """Whether the tolerance that was asked for was met; True where none was."""
        return self.stopped is None

    @property
    def is_sampled(self) -> bool:
        """Whether these are estimates from samples, with errors of their own; formulas are checked by samples."""
        return self.method == SAMPLED

    @property
    def mean_standard_error(self) -> Tensor | None:
        return None if self.error is None else self.error.mean

    @property
    def variance_standard_error(self) -> Tensor | None:
        return None if self.error is None else self.error.variance

    @property
    def covariance_standard_error(self) -> Tensor | None:
        return None if self.error is None else self.error.covariance

    def __getitem__(self, name: str | int) -> OutputMoments:
        """One of several tensors that the network returns, by its key, in its own shape."""
        found = [part for part in self.parts if part.name == str(name)]
        if not found:
            listed = ", ".join(repr(part.name) for part in self.parts) or "one tensor only"
            raise KeyError(f"no output {name!r}; there are: {listed}")
        part, batch = found[0], self.mean.shape[:-1]
        span = slice(part.start, part.stop)

        def own(x: Tensor) -> Tensor:
            return x[..., span].reshape((*batch, *part.shape))

        covariance = None if self.covariance is None else self.covariance[..., span, span]
        error = self.error
        if error is not None:
            matrix = None if error.covariance is None else error.covariance[..., span, span]
            error = MomentErrors(own(error.mean), own(error.variance), matrix)
        return dataclasses.replace(
            self, mean=own(self.mean), variance=own(self.variance), covariance=covariance, error=error, wins=None,
            parts=(), output_ndim=len(part.shape),
        )  # fmt: skip

    def to(self, *args: Any, **kwargs: Any) -> OutputMoments:
        """Convert to another dtype or device, as `Tensor.to` does; which outputs they are stays integer."""
        tensors: dict[str, Any] = {
            field.name: value.to(*args, **kwargs)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and value.is_floating_point()
        }
        where = None if self.outputs is None else self.outputs.to(tensors["mean"].device)
        error = self.error
        if error is not None:
            moved = {name: x.to(*args, **kwargs) for name, x in vars(error).items() if x is not None}
            error = MomentErrors(**moved)
        return dataclasses.replace(self, **tensors, outputs=where, error=error)

    def class_probabilities(self) -> Tensor:
        """How often each class would win, (*batch, k).

        Sampled moments have the frequencies of their own samples, with the Gaussian of these moments counted as one
        sample more, so that what was never seen is not 0. Formulas take the scores for Gaussian with these moments, an
        approximation: small probabilities are accurate for that Gaussian, and useless for most networks
        (`nm.class_probabilities` and `nm.flip_probability` ask the network, and have intervals). Outputs that are
        probabilities, of a softmax, are far from Gaussian, and a warning says so. Of a choice of scores, how often each
        would win among them. They sum to 1, are in float64 and carry no gradient.
        """
        self._warn_of_probabilities("class_probabilities")
        if self.covariance is None:
            if self.wins is None:
                raise ValueError(
                    f"class_probabilities: {self._flat_mean().shape[-1]} outputs have no covariance; choose some with "
                    f"outputs=, or pass covariance=True"
                )
            return self.wins.double()
        fitted = winning_probabilities(self._flat_mean(), positive_semidefinite(self.covariance))
        return fitted if self.wins is None else self._with_fitted(self.wins.double(), fitted)

    def flip_probability(self, label: int | Tensor) -> Tensor:
        """How often another class than `label` would win, (*batch); see `class_probabilities`.

        `label` is the class, an int or an int tensor of the batch's shape.
        """
        self._warn_of_probabilities("flip_probability")
        place = self._position(label)
        if self.covariance is None:
            fitted = None
        else:
            fitted = losing_probability(self._flat_mean(), positive_semidefinite(self.covariance), place)
        if self.wins is None:
            if fitted is None:
                self.class_probabilities()
            assert fitted is not None
            return fitted
        where = torch.as_tensor(place, device=self.wins.device).expand(self.wins.shape[:-1]).unsqueeze(-1)
        lost = 1 - self.wins.double().gather(-1, where).squeeze(-1)
        return lost if fitted is None else self._with_fitted(lost, fitted)

    def _warn_of_probabilities(self, name: str) -> None:
        """Formulas fit a Gaussian to the outputs, which is no fit where these are a softmax's."""
        if self.wins is not None:
            return
        mean = self._flat_mean()
        variance = self.variance.detach().double().reshape(mean.shape)
        inside = bool((variance <= (mean * (1 - mean)).clamp(min=0) + 1e-3).all())  # as of what lies between 0 and 1
        if mean.shape[-1] > 1 and inside and bool(((mean.sum(-1) - 1).abs() < 1e-3).all()):
            warnings.warn(
                f"{name}: the outputs seem to be probabilities (they sum to 1), which a Gaussian does not fit; give "
                f"the network without its softmax, or use netmoments.{name}(network, noise), which asks the network",
                stacklevel=3,
            )

    def _flat_mean(self) -> Tensor:
        """The means (*batch, D) of outputs of any shape, in float64."""
        return self.mean.detach().double().reshape((*self.batch_shape, -1))

    def _with_fitted(self, frequency: Tensor, fitted: Tensor) -> Tensor:
        """Frequencies among the samples, with a fitted Gaussian's probabilities as one sample more."""
        return (frequency * self.samples + fitted) / (self.samples + 1)

    @property
    def batch_shape(self) -> torch.Size:
        return self.mean.shape[: self.mean.dim() - self.output_ndim]

    def __repr__(self) -> str:
        batch = f"batch {tuple(self.batch_shape)}, " if self.batch_shape else ""
        count = self.mean.shape[len(self.batch_shape) :].numel()
        reached = "" if self.reached is None else f", error {float(self.reached.max()):.2g}"
        return f"OutputMoments({batch}{count} outputs by {self.method}{reached})"

    def __str__(self) -> str:
        return "\n".join(printed(self))

    def compare(self, other: OutputMoments | SampledMoments) -> Comparison:
        """The difference to sampled moments of the same scores, in units of the samples' standard errors."""
        if not isinstance(other, OutputMoments | SampledMoments):
            raise TypeError(f"compare: other must be moments, got {describe(other)}")
        if isinstance(other, OutputMoments) and not other.is_sampled:
            raise ValueError(
                f'compare: other must be sampled (method="auto", "sampling", or monte_carlo), with errors that are '
                f"those of its samples; it is by {other.method}"
            )
        if self.mean.shape != other.mean.shape:
            raise ValueError(
                f"compare: both must be of the same scores, got shapes {tuple(self.mean.shape)} and "
                f"{tuple(other.mean.shape)}; give both the same outputs="
            )
        if self.covariance is None or other.covariance is None:
            raise ValueError("compare: both must have a covariance; choose outputs=, or pass covariance=True")
        if isinstance(other, OutputMoments) and not torch.equal(self._scores(), other._scores()):
            raise ValueError("compare: both must be of the same scores; give both the same outputs=")
        parts: dict[str, Any] = {}
        for name in ("mean", "variance", "covariance"):
            mine, sampled = (getattr(moments, name).detach().double().cpu() for moments in (self, other))
            error = getattr(other, f"{name}_standard_error").double().cpu()
            if self.is_sampled:
                error = torch.hypot(error, getattr(self.error, name).double().cpu())
            parts[name] = _in_units_of(error, mine - sampled)
            if name != "covariance":
                parts[f"{name}_relative"] = relative_difference(mine, sampled)
        return Comparison(**parts)

    def _scores(self) -> Tensor:
        """Which scores these are, (*batch, k), on the CPU."""
        if self.outputs is None:
            return torch.arange(self.mean.shape[-1]).expand(self.mean.shape)
        return self.outputs.cpu()

    def _position(self, label: int | Tensor) -> int | Tensor:
        """Where the score of a class is among the chosen ones."""
        if self.outputs is None:
            return label
        wanted = torch.as_tensor(label, device=self.outputs.device)
        if wanted.is_floating_point() or wanted.dtype == torch.bool:
            raise TypeError(f"flip_probability: label must be an integer or a tensor of them, got {describe(label)}")
        batch = self.outputs.shape[:-1]
        try:
            wanted = wanted.expand(batch)
        except RuntimeError:
            raise ValueError(
                f"flip_probability: label must broadcast to the batch shape {tuple(batch)}, got {describe(label)}"
            ) from None
        hits = self.outputs == wanted.unsqueeze(-1)
        if not bool(hits.any(-1).all()):
            missing = wanted[~hits.any(-1)].flatten().tolist()
            raise ValueError(
                f"flip_probability: the score of class {missing[0]} is not among the chosen outputs; add it to outputs="
            )
        return hits.to(torch.uint8).argmax(-1)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Differences to a sampled reference: in its standard errors, and relative, 2|x−y|/(|x|+|y|)."""

    mean: Tensor
    variance: Tensor
    covariance: Tensor
    mean_relative: Tensor
    variance_relative: Tensor

    def __str__(self) -> str:
        lines = []
        for name in ("mean", "variance"):
            relative, errors = getattr(self, f"{name}_relative"), getattr(self, name)
            lines.append(
                f"{name}: off by {float(relative.mean()):.2g} on average, {float(errors.abs().max()):.1f} SE at most"
            )
        return "; ".join(lines)


def _in_units_of(error: Tensor, difference: Tensor) -> Tensor:
    """difference/error; 0/0 is 0."""
    return torch.where(difference == 0, 0.0, difference / error)


def positive_semidefinite(covariance: Tensor) -> Tensor:
    """A covariance in float64 without what rounding or sampling left of asymmetry and of negative eigenvalues."""
    precise = covariance.detach().double()
    precise = 0.5 * (precise + precise.mT)
    values, vectors = torch.linalg.eigh(precise)
    if bool((values >= 0).all()):
        return precise
    return (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT


ROWS, INPUTS = 12, 3
"""Outputs and inputs that are printed, at most."""


def output_names(moments: OutputMoments, place: tuple[int, ...]) -> list[str]:
    """The number of each output; of several tensors, the name of its own and its number there."""
    if moments.outputs is not None:
        return list(map(str, moments.outputs[place].tolist()))
    if not moments.parts:
        return list(map(str, range(moments.mean.shape[len(moments.batch_shape) :].numel())))
    return [
        f"{printable(part.name)[:LONGEST_NAME]} {number}"
        for part in moments.parts
        for number in range(part.stop - part.start)
    ]


LONGEST_NAME = 20
"""Characters of an output's name that are printed."""


def printed(moments: OutputMoments) -> Iterator[str]:
    """A table: each output's mean and standard deviation with their errors; method, samples, time, tolerance."""
    batch = moments.batch_shape
    outputs = moments.mean.shape[len(batch) :].numel()
    runs = f"{moments.samples:,} runs of the network an input, " if moments.samples else ""
    yield f"{moments.method}: {runs}{moments.seconds:.2g} s" + (f"; {moments.reason}" if moments.reason else "")
    if moments.tolerance is not None and moments.reached is not None:
        worst = float(moments.reached.max())
        state = "met" if moments.met else f"not met within {moments.stopped}"
        yield f"tolerance {moments.tolerance:g} {state}: {worst:.2g} reached"
    places = list(itertools.product(*map(range, batch)))
    for place in places[:INPUTS]:
        if batch:
            yield f"input {', '.join(map(str, place))}"
        mean = moments.mean[place].detach().double().cpu().flatten()
        spread = moments.variance[place].detach().double().cpu().flatten().clamp(min=0).sqrt()
        rows = range(outputs) if outputs <= ROWS else mean.topk(ROWS).indices.sort().values.tolist()
        names = output_names(moments, place)
        width = max(8, *(len(names[row]) for row in rows))
        if moments.error is None:
            yield f"{'output':>{width}}  {'mean':>10}  {'std':>10}   (not checked)"
            for row in rows:
                yield f"{names[row]:>{width}}  {mean[row]:>10.4g}  {spread[row]:>10.4g}"
            continue
        off = moments.error.mean[place].double().cpu().flatten()
        of_spread = moments.error.variance[place].double().cpu().flatten() / (2 * spread.clamp(min=1e-300))
        yield f"{'output':>{width}}  {'mean':>10} ± {'error':<8}  {'std':>10} ± {'error':<8}"
        for row in rows:
            spread_error = of_spread[row] if spread[row] > 0 else 0.0
            yield (
                f"{names[row]:>{width}}  {mean[row]:>10.4g} ± {off[row]:<8.2g}  "
                f"{spread[row]:>10.4g} ± {spread_error:<8.2g}"
            )
        if outputs > ROWS:
            yield f"{'…':>{width}}  the {ROWS} largest of {outputs:,}"
    if len(places) > INPUTS:
        yield f"… {len(places) - INPUTS:,} more inputs"

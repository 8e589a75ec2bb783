"""Estimates of a probability with errors and intervals, when they are good enough, and the results that users get.

`FlipEstimate` is an estimate with its standard error, `Tolerance` says when that is small enough, and `EntryResult` is
what was found for one entry of a batch. Users get `FlipProbability`, `ClassProbabilities` and `NearestFlip`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.normal import QUANTILE, wilson_interval

DISAGREE = 3.0
"""Two estimates agree if they are within so many standard errors."""
UNSURE = 2.0
"""Intervals are symmetric in the log-odds up to this half-width over p(1 − p); beyond it log-odds say nothing."""
NEVER_SEEN = 3.0
"""What none of n plain samples shows has a probability below NEVER_SEEN/n, with 95 % ("rule of three")."""
UNKNOWN = 1e9
"""How many times the runs are needed, as long as no flip was found."""


@dataclass(frozen=True)
class Tolerance:
    """The error of a probability that is small enough."""

    relative: float
    """A standard error over the probability."""
    absolute: float | None = None
    """A half-width of the 95 % interval, which is enough too."""

    def times_needed(self, probability: float, error: float, half_width: float | None = None) -> float:
        """How many times as many runs as gave this standard error are needed; at most 1 if the tolerance is met.

        Errors fall as 1/√runs, so this is (error/wanted error)². With the standard deviation of one run as the error it
        is the number of runs. The half-width of the interval is 1.96 errors where none is given.
        """
        wanted = self.relative * max(probability, 0.0)
        times = (error / wanted) ** 2 if wanted > 0 else UNKNOWN
        if self.absolute is None:
            return times
        half_width = QUANTILE * error if half_width is None else half_width
        return min(times, (half_width / self.absolute) ** 2)


@dataclass(frozen=True)
class FlipEstimate:
    """A probability with its standard error, from so many samples."""

    probability: float
    error: float
    samples: int
    largest_share: float = 0.0
    """The largest contribution of one sample, over the probability."""
    freedom: float = math.inf
    """Degrees of freedom of the standard error."""
    predicted_error: float = 0.0
    """The standard error that was expected beforehand."""
    unseen_error: float = 0.0
    """The standard error due to flips that nothing expects and too few plain samples would show."""

    @property
    def careful_error(self) -> float:
        """√(s² + (share·p)²), where s is no less than what was predicted, and never below the error of the unseen.

        The second term is one more sample as large as the largest. Samples that happen to lack large weights show a
        small probability with a small error, and both are too small.
        """
        careful = math.hypot(max(self.error, self.predicted_error), self.largest_share * self.probability)
        return max(self.unseen_error, careful)


@dataclass(frozen=True, eq=False)
class EntryResult:
    """The estimate for one entry, and how it came about."""

    estimate: FlipEstimate
    second: FlipEstimate | None
    """A second estimate from a part of the runs, by which the first is checked."""
    agreed: bool
    """Whether both estimates are compatible. Where there is only one it is True, or False if the time ended before the
    second."""
    route: str
    wins: Tensor
    """By how much weight each other class won, (d,)."""
    met: bool
    """Whether the tolerance was met and the two agree."""
    bounds: tuple[float, float] | None = None
    """The 95 % interval, where it is not that of the estimate (`interval`)."""

    @property
    def probability(self) -> float:
        """The estimate, cut to [0, 1]."""
        return min(max(self.estimate.probability, 0.0), 1.0)

    @property
    def rival(self) -> int:
        """The class that won most; −1 where none was seen."""
        return int(self.wins.argmax()) if float(self.wins.sum()) > 0 else -1

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval; where the second estimate does not agree, the smallest that holds those of both."""
        low, high = interval(self.estimate) if self.bounds is None else self.bounds
        if self.agreed or self.second is None:
            return low, high
        second_low, second_high = interval(self.second)
        return min(low, second_low), max(high, second_high)


def agree(first: FlipEstimate, second: FlipEstimate) -> bool:
    """Whether two estimates are within `DISAGREE` standard errors, in logarithms where both are positive."""
    error = math.hypot(first.careful_error, second.careful_error)
    if first.probability <= 0 or second.probability <= 0:
        return abs(first.probability - second.probability) <= DISAGREE * error
    relative = math.hypot(first.careful_error / first.probability, second.careful_error / second.probability)
    distance = abs(math.log(first.probability / second.probability))
    return distance <= DISAGREE * relative or abs(first.probability - second.probability) <= DISAGREE * error


def student_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t with so many degrees of freedom (Cornish–Fisher, within 1 % from 3 on)."""
    z, n = QUANTILE, max(freedom, 1.5)
    cubic = (z**3 + z) / 4
    fifth = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    seventh = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + cubic / n + fifth / n**2 + seventh / n**3


def interval(estimate: FlipEstimate) -> tuple[float, float]:
    """A 95 % interval, symmetric in the log-odds: odds·exp(±t s/(p(1 − p))).

    Estimates of rare events are skewed: the logarithm of one is nearer to Gaussian than the estimate itself, and its
    interval holds no negative numbers. Where little more than the size of the error is known, the interval is p ± t s.
    """
    p, error = estimate.probability, student_quantile(estimate.freedom) * estimate.careful_error
    if p <= 0 or p >= 1 or error > UNSURE * p * (1 - p):
        return max(0.0, min(p, 1.0) - error), min(1.0, max(p, 0.0) + error)
    width = error / (p * (1 - p))
    odds = p / (1 - p)
    low, high = odds * math.exp(-width), odds * math.exp(width)
    return low / (1 + low), high / (1 + high)


def half_width(estimate: FlipEstimate) -> float:
    """Half the width of the 95 % interval."""
    low, high = interval(estimate)
    return (high - low) / 2


def shares_interval(count: Tensor, samples: Tensor) -> Tensor:
    """95 % intervals (..., 2) of frequencies: Wilson's; where none or all of the samples count, the rule of three."""
    n = samples.double()
    low, high = wilson_interval(count / n, n)
    low = torch.where(count == samples, 1 - NEVER_SEEN / n, torch.where(count == 0, 0.0, low))
    high = torch.where(count == 0, NEVER_SEEN / n, torch.where(count == samples, 1.0, high))
    return torch.stack([low, high], -1).clamp(0, 1)


def wilson(count: int, samples: int) -> tuple[float, float]:
    """The interval of one frequency (`shares_interval`)."""
    low, high = shares_interval(torch.tensor(count), torch.tensor(samples)).tolist()
    return low, high


ROWS = 24
"""A table has at most so many rows."""


@dataclass(frozen=True, eq=False)
class FlipProbability:
    """How often another class than the label wins: estimates with intervals of 95 %, not certificates.

    Printing it gives a table with a row for each input.

    >>> from netmoments import Gaussian, flip_probability
    >>> found = flip_probability(torch.nn.Identity().eval(), Gaussian(torch.tensor([[1.0, 0.0], [9.0, 0.0]]), std=1.0))
    >>> found.probability.shape, found.interval.shape, found.rival.tolist()
    (torch.Size([2]), torch.Size([2, 2]), [1, 1])
    """

    probability: Tensor
    """(*batch), in float64."""
    interval: Tensor
    """Of 95 %: its lower and upper end, (*batch, 2)."""
    standard_error: Tensor
    """(*batch)."""
    label: Tensor
    """(*batch), the class that should win."""
    rival: Tensor
    """The class that wins most often instead, (*batch); −1 where none was seen."""
    runs: Tensor
    """Runs of the network for each entry, (*batch); a backward pass counts two."""
    route: list[str]
    """How each entry was estimated, in the order of a flattened batch: by "frequencies", "importance", "splitting", or
    "exact"; "out of time" if nothing was found in time.
    """
    met: Tensor
    """Whether the error is as small as asked and the second estimate agrees, (*batch)."""
    agreement: Tensor
    """The probability by a second estimate, from a part of the runs, (*batch); NaN where there is none."""
    agreed: Tensor
    """Whether the second estimate is compatible with the first, (*batch). If not, the interval holds both; False also
    where the time ended before there was a second one."""
    seconds: float

    def __repr__(self) -> str:
        batch = f"batch {tuple(self.probability.shape)}, " if self.probability.dim() else ""
        if self.probability.numel() == 1:
            return f"FlipProbability({described(self, 0)})"
        low, high = float(self.probability.min()), float(self.probability.max())
        return f"FlipProbability({batch}{low:.3g} to {high:.3g}, {int(self.runs.sum()):,} runs)"

    def __str__(self) -> str:
        return "\n".join(printed(self))


def described(found: FlipProbability, place: int) -> str:
    """One entry in words: "1.2e-06, 95 % 1e-06 to 1.5e-06", or "below 3e-07 after 1,000,000 runs"."""
    p = float(found.probability.flatten()[place])
    low, high = found.interval.reshape(-1, 2)[place].tolist()
    runs = int(found.runs.flatten()[place])
    if p == 0 and high > 0:
        return f"below {high:.2g} after {runs:,} runs"
    if found.route[place] == "exact":
        return f"{p:.3g}, exact"
    return f"{p:.3g}, 95 % {low:.3g} to {high:.3g}, {runs:,} runs"


def printed(found: FlipProbability) -> Iterator[str]:
    """The lines of a table, with a row for each entry."""
    total = int(found.runs.sum())
    yield f"flip probability: {total:,} runs of the network, {found.seconds:.2g} s"
    head = f"{'input':>10}  {'label':>5}  {'rival':>5}  {'probability':>11}  {'95 % interval':>21}  {'second':>9}"
    yield head + f"  {'runs':>10}  route"
    places = list(itertools.product(*map(range, found.probability.shape)))
    flat = {name: getattr(found, name).flatten().tolist() for name in ("label", "rival", "probability", "runs", "met")}
    second, agreed = found.agreement.flatten().tolist(), found.agreed.flatten().tolist()
    bounds = found.interval.reshape(-1, 2).tolist()
    for row, place in enumerate(places[:ROWS]):
        name = ", ".join(map(str, place)) if place else "·"
        p, (low, high) = flat["probability"][row], bounds[row]
        value = f"{p:.3g}" if p > 0 or high == 0 else f"< {high:.2g}"
        other = "" if second[row] != second[row] else f"{second[row]:.2g}"
        rival = "" if flat["rival"][row] < 0 else str(flat["rival"][row])
        remark = found.route[row] + ("" if flat["met"][row] else ", not as exact as asked")
        remark += ", the two estimates disagree" if not agreed[row] and other else ""
        within = f"{low:.3g} to {high:.3g}"
        yield (
            f"{name:>10}  {flat['label'][row]:>5}  {rival:>5}  {value:>11}  {within:>21}  {other:>9}"
            f"  {flat['runs'][row]:>10,}  {remark}"
        )
    if len(places) > ROWS:
        yield f"… {len(places) - ROWS:,} more inputs"


@dataclass(frozen=True, eq=False)
class ClassProbabilities:
    """How often each class wins: estimates with intervals of 95 %. Printing it gives a table.

    >>> from netmoments import Gaussian, class_probabilities
    >>> found = class_probabilities(torch.nn.Identity().eval(), Gaussian(torch.tensor([1.0, 0.0]), std=1.0))
    >>> int(found.winner), bool(found.interval[0, 0] < 0.7602 < found.interval[0, 1])  # Φ(1/√2)
    (0, True)
    """

    probability: Tensor
    """(*batch, d), in float64; sums to 1."""
    interval: Tensor
    """Of 95 %: lower and upper ends, (*batch, d, 2)."""
    standard_error: Tensor
    """(*batch, d)."""
    runs: Tensor
    """Runs of the network for each entry, (*batch); a backward pass counts two."""
    met: Tensor
    """Whether every class is as exact as asked, (*batch)."""
    seconds: float

    @property
    def winner(self) -> Tensor:
        """The class that wins most often, (*batch)."""
        return self.probability.argmax(-1)

    def __repr__(self) -> str:
        batch, classes = tuple(self.probability.shape[:-1]), self.probability.shape[-1]
        return (
            f"ClassProbabilities({f'batch {batch}, ' if batch else ''}{classes} classes, {int(self.runs.sum()):,} runs)"
        )

    def __str__(self) -> str:
        lines = [f"class probabilities: {int(self.runs.sum()):,} runs of the network, {self.seconds:.2g} s"]
        classes = self.probability.shape[-1]
        flat, bounds = self.probability.reshape(-1, classes), self.interval.reshape(-1, classes, 2)
        for row in range(min(len(flat), ROWS)):
            best = flat[row].topk(min(3, flat.shape[1])).indices.tolist()
            words = [
                f"{k}: {float(flat[row, k]):.3g} ({float(bounds[row, k, 0]):.3g} to {float(bounds[row, k, 1]):.3g})"
                for k in best
            ]
            lines.append(f"{row:>6}  " + ",  ".join(words))
        if len(flat) > ROWS:
            lines.append(f"… {len(flat) - ROWS:,} more inputs")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class NearestFlip:
    """The smallest changes of inputs that were found to change the answer: upper bounds of the least, no certificates.

    >>> from netmoments import Gaussian, nearest_flip
    >>> found = nearest_flip(torch.nn.Identity().eval(), Gaussian(torch.tensor([[1.0, 0.0], [9.0, 0.0]]), std=1.0))
    >>> found.distance.shape, found.noise.shape, found.rival.tolist()
    (torch.Size([2]), torch.Size([2, 2]), [1, 1])
    """

    noise: Tensor
    """The change δ that is added to the mean, (*batch, *event); NaN where nothing was found."""
    distance: Tensor
    """Its length √(δᵀΣ⁻¹δ) in standard deviations of the noise, (*batch), in float64; ∞ where nothing was found."""
    label: Tensor
    """(*batch), the class that should win."""
    rival: Tensor
    """The class that wins there, (*batch); −1 where nothing was found."""
    runs: Tensor
    """Runs of the network for each entry, (*batch); a backward pass counts two."""

    def __repr__(self) -> str:
        found = self.distance[torch.isfinite(self.distance)]
        if found.numel() == 0:
            return f"NearestFlip(none found, {int(self.runs.sum()):,} runs)"
        far = f"{float(found.min()):.3g}" + (f" to {float(found.max()):.3g}" if found.numel() > 1 else "")
        missing = self.distance.numel() - found.numel()
        none = f", none for {missing:,} of {self.distance.numel():,}" if missing else ""
        return f"NearestFlip({far} standard deviations{none}, {int(self.runs.sum()):,} runs)"


def stacked(values: list[float], batch: torch.Size, device: torch.device) -> Tensor:
    """One number for each entry as a tensor with the batch's shape, in float64."""
    return torch.tensor(values, dtype=torch.float64, device=device).reshape(batch)

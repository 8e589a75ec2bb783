"""As many samples as a tolerance needs: mirrored and independent pairs, with expected slopes as control.

A first few pairs say how the outputs vary; from that follows at how many points the network is differentiated for the
slopes, how many of the pairs should be mirrored, and how many are needed. More are drawn, in a few rounds, until the
errors of all inputs are within the tolerance or a limit is reached.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from netmoments.gaussian import Gaussian
from netmoments.memory import directions_at_once, elements_together
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision
from netmoments.progress import Progress
from netmoments.sampling.evaluation import random_seed
from netmoments.sampling.fast_network import FastNetwork, fast_network, half_network
from netmoments.sampling.pair_sums import (
    FOLDS,
    CorrectionSums,
    PairCosts,
    PairEstimate,
    PairSums,
    allowing_for_skewness,
    block_sums,
    chosen,
    combined,
    corrected,
    estimated,
    pair_weights,
)

PILOT = 64
"""Pairs of the first round."""
GROWTH = 8
"""A round has at most so many times the pairs of all before: what few pairs say of a variance is not to be trusted."""
MARGIN = 1.05
"""More pairs than the errors so far ask for, so that another round is seldom needed."""
ENOUGH = 0.75
"""A round has the pairs that this share of its inputs still needs at most; the others go on."""
HALF_SHARE = 0.5
"""Of the tolerance: half precision is used if its correction is known to within this."""
BLOCK = 1024
"""Pairs of one input that are summed at a time on a CPU."""
GPU_ROWS = 2048
"""Inputs that go through the network together on a GPU, for one input; more for several."""
BACKWARD = 3
"""What one output's gradient costs, in runs of the network."""
MOST_POINTS = 16
"""Points at which gradients are taken, at most."""
SLOPE_NUMBERS = 2**26
"""Slopes are kept for all inputs of a call if these are no more numbers than that."""
OVERFLOWED = ", in float32 as float16 overflowed"
"""What is said of it."""
ROUNDING = 16
"""Units in the last place of an output's mean, up to which it is taken not to vary."""


@dataclass(frozen=True)
class Goal:
    """When to stop: the tolerance, or a limit on the samples of each input, or on the seconds of the whole."""

    tolerance: float
    samples: int
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Adaptive:
    """What was found for E inputs: estimates, how often each output was the largest, and what it took."""

    estimate: PairEstimate
    samples: Tensor
    """Runs of the network for each input, (E,), pairs and gradients' points."""
    wins: Tensor
    """Shares (E, d) of the samples in which each output was the largest."""
    reached: Tensor
    """The tolerance that was reached for each input, (E,)."""
    points: int
    """Points at which the network was differentiated."""
    stopped: str | None
    """What ended the sampling before the tolerance was met."""
    remark: str = ""
    """On the precision, where there is something to say."""
    share: float = 1.0
    """Of the pairs, mirrored ones."""

    @property
    def how(self) -> str:
        """In words."""
        kinds = {1.0: "mirrored pairs of samples", 0.0: "independent samples"}
        kind = kinds.get(self.share, f"samples, {self.share:.0%} in mirrored pairs")
        if self.points == 0:
            return kind + self.remark
        where = "at the mean" if self.points == 1 else f"from gradients at {self.points} points"
        return f"{kind}, controlled by expected slopes {where}{self.remark}"


def relative_errors(estimate: PairEstimate, dtype: torch.dtype) -> Tensor:
    """The tolerance that an estimate meets, (E,): errors of means in standard deviations, errors of variances relative
    and by √2, the larger of their averages over the outputs.

    What an output varies by within the rounding of its values, in `dtype`, counts as that rounding.
    """
    rounding = ROUNDING * torch.finfo(dtype).eps * estimate.mean.abs()
    deviation = torch.maximum(estimate.variance.clamp(min=0).sqrt(), rounding)
    mean, second = estimate.mean_error.sqrt(), estimate.variance_error.sqrt()
    mean = torch.where(mean > 0, mean / deviation, 0.0).mean(-1)
    second = torch.where(second > 0, second / deviation**2, 0.0).mean(-1)
    return torch.maximum(mean, second / math.sqrt(2))


@torch.no_grad()
def sampled_to_tolerance(
    model: NetworkModel, noise: Gaussian, outputs: Tensor | None, goal: Goal, *, seed: int, products: bool
) -> Adaptive:
    """Moments of the outputs (all, or those with indices (E, k)) for noise with one batch dimension, E inputs.

    As many inputs go together as fit into a piece of work (see `memory`).
    """
    start, parts = time.perf_counter(), []
    count = model.outputs if outputs is None else outputs.shape[1]
    each = 2 * PILOT * (noise.size + count) + 2 * FOLDS * 9 * (count**2 if products else count)
    together = elements_together("backward", noise.mean, each)
    with torch.inference_mode(False), full_precision():
        for number, some in enumerate(torch.arange(len(noise.mean), device=noise.device).split(together)):
            own = seed if number == 0 else random_seed(seed, "inputs", number)
            work = _Sampling(model, noise.entries(some), None if outputs is None else outputs[some], own)
            parts.append(work.until(goal, products, start))
    return joined(parts)


def joined(parts: list[Adaptive]) -> Adaptive:
    """What was found for several groups of inputs, as one."""
    if len(parts) == 1:
        return parts[0]
    estimates = [vars(part.estimate) for part in parts]
    estimate = PairEstimate(**{name: torch.cat([each[name] for each in estimates]) for name in estimates[0]})
    samples, wins, reached = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("samples", "wins", "reached")
    )
    stopped = next((part.stopped for part in parts if part.stopped is not None), None)
    return replace(parts[0], estimate=estimate, samples=samples, wins=wins, reached=reached, stopped=stopped)


@torch.no_grad()
def sampled_plainly(model: NetworkModel, noise: Gaussian, outputs: Tensor, samples: int, *, seed: int) -> Adaptive:
    """Means and variances from so many independent samples, without covariances: for any number of outputs."""
    with torch.inference_mode(False), full_precision():
        work = _Sampling(model, noise, outputs, seed)
        work.share = 0.0
        return work.until(Goal(1e-12, samples), False, time.perf_counter())


class _Sampling:
    """A network, and the noise that is put into it."""

    def __init__(self, model: NetworkModel, noise: Gaussian, outputs: Tensor | None, seed: int) -> None:
        self.model, self.outputs, self.seed = model, outputs, seed
        self.noise = Gaussian._trusted(noise.mean.detach(), noise.covariance.to(noise.dtype), noise.event_ndim)
        self.mean = self.noise.flat_mean
        self.fast, self.half = fast_network(model), half_network(model)
        self.slopes: Tensor | None = None
        self.known: Tensor | None = None
        self.correction: CorrectionSums | None = None
        self.points = 0
        self.share, self.costs = 1.0, PairCosts((1.0, 1.0), (1.0, 1.0))
        self.remark = ""

    def until(self, goal: Goal, products: bool, start: float) -> Adaptive:
        """Rounds of pairs until the goal is reached; in half precision if the first round says that it can be.

        `start` is when the work of the goal began.
        """
        share = self.share
        try:
            return self._until(goal, products, start)
        except _Overflow:  # all anew
            self.half, self.correction, self.remark = None, None, OVERFLOWED
            self.share, self.slopes, self.known, self.points = share, None, None, 0
            return self._until(goal, products, start)

    def _until(self, goal: Goal, products: bool, start: float) -> Adaptive:
        stopped: str | None = None
        self.generator = torch.Generator(self.noise.device).manual_seed(self.seed)
        self.bad: Tensor | None = None
        most = max(FOLDS, goal.samples // 2 // FOLDS * FOLDS)
        self.sums: dict[bool, PairSums] = {}
        self._first_round(most, goal, products)
        with Progress("sampling", most) as progress:
            shown = 0
            while True:
                estimate, errors = self._estimate(products)
                reached, done = errors.cpu(), self._pairs()
                self._require_finite(int(done.sum()))
                progress.advance(int(done.min()) - shown)
                shown = int(done.min())
                missing = missing_pairs(reached, done, goal.tolerance, most)
                if not bool(missing.any()):
                    if bool((reached > goal.tolerance).any()):
                        stopped = f"the limit of {goal.samples:,} samples"
                    break
                if goal.seconds is not None and time.perf_counter() - start > goal.seconds:
                    stopped = f"the limit of {goal.seconds:g} seconds"
                    break
                self._round(missing, done, most, goal, start)
        runs = 2 * done + self.points + (0 if self.correction is None else 2 * self.correction.count)
        wins = torch.stack([sums.wins for sums in self.sums.values()]).sum(0)
        wins = wins / wins.sum(-1, keepdim=True)
        found = allowing_for_skewness(estimate)
        return Adaptive(found, runs, wins, reached, self.points, stopped, self.remark, self.share)

    def _pairs(self) -> Tensor:
        """How many pairs of each entry there are, (E,)."""
        return torch.stack([sums.pairs for sums in self.sums.values()]).sum(0)

    def _first_round(self, most: int, goal: Goal, products: bool) -> None:
        """A few pairs of all entries, and what they decide: the slopes, how many pairs to mirror, half precision.

        They are mirrored, unless all are to be independent.
        """
        every = torch.arange(len(self.mean), device=self.noise.device)
        mirrored = self.share > 0
        pairs = PILOT
        if self.noise.device.type == "cuda":  # where they cost next to nothing
            pairs = max(PILOT, min(8 * PILOT, 32 * PILOT // len(every) // FOLDS * FOLDS))
        deviations, others = self._draw(every, min(pairs, most), mirrored)
        values = self._values(self.fast, self.mean, deviations, others, self.outputs)
        centre = ((values[0] + values[1]) / 2).mean(0).double()
        lines = None
        if mirrored:
            self._find_slopes(values[0], values[1], goal, products)
            lines = None if self.slopes is None else (_lines(deviations, self.slopes), None)
            self.costs = PairCosts.seen(values[0], values[1], None if lines is None else lines[0])
            share = self.costs.share
            self.share = share if 0.1 < share < 0.9 else float(round(share))
        if self.half is not None:
            low = self._values(self.half, self.mean, deviations, others, self.outputs)
            correction = CorrectionSums(centre, values, low, products)
            left = relative_errors(correction.alone(centre, values, products), self.noise.dtype)
            if bool((left <= HALF_SHARE * goal.tolerance).all()):
                values, self.correction = low, correction
            else:
                self.half = None
                self.remark = "" if bool(torch.isfinite(torch.stack(low)).all()) else OVERFLOWED
        self._count_bad(torch.stack(values))
        self.sums[mirrored] = PairSums(centre, products, mirrored)
        self.sums[mirrored].add(every, len(deviations), *block_sums(*values, lines, centre, products))
        if self.share < 1 and mirrored:
            self.sums[False] = PairSums(centre, products, False)

    def _round(self, missing: Tensor, done: Tensor, most: int, goal: Goal, start: float) -> None:
        """So many more pairs for the entries that miss some, a block at a time."""
        network, on_gpu = self.half or self.fast, self.noise.device.type == "cuda"
        active = missing.nonzero().squeeze(1)
        entries = len(active)
        if on_gpu:  # few different shapes, so that work can be recorded: all entries, the neediest half, a quarter, …
            entries = max(1, len(missing) // 2 ** math.ceil(math.log2(len(missing) / entries)))
            active = missing.argsort(descending=True, stable=True)[:entries].sort().values
            block = max(FOLDS, min(network.batch, max(GPU_ROWS, len(missing) * GPU_ROWS // 4)) // (2 * entries))
        else:
            block = max(network.batch // (2 * entries), BLOCK // entries)
        block = min(block, elements_together("pass", self.mean, 2 * entries * self.noise.size))
        block = max(FOLDS, block // FOLDS * FOLDS)
        wanted = missing[active].sort().values
        pairs = int(wanted[int(ENOUGH * (len(wanted) - 1))])
        unit = block if on_gpu else FOLDS
        pairs = min(-(-pairs // unit) * unit, most - int(done[active].max()))
        mirrored = pairs if self.share == 1 else min(pairs, round(self.share * pairs / unit) * unit)
        chosen = active.to(self.noise.device)
        for kind, count in ((True, mirrored), (False, pairs - mirrored)):
            for begun in range(0, count, block):
                if goal.seconds is not None and time.perf_counter() - start > goal.seconds:
                    return
                self._add_block(network, chosen, min(block, count - begun), kind)

    def _add_block(self, network: FastNetwork, chosen: Tensor, count: int, mirrored: bool) -> None:
        """So many pairs of one kind more, of the chosen entries."""
        sums = self.sums[mirrored]
        own = [self.mean[chosen], sums.centre[chosen]]
        own += [x[chosen] for x in (self.slopes, self.outputs) if x is not None]
        drawn = [x for x in self._draw(chosen, count, mirrored) if x is not None]
        work, kind = self._block_work(network, sums.products, mirrored), self._kind("block", sums.products)
        found, wins, bad = network.replayed((*kind, mirrored), work, *own, *drawn)
        self.bad = bad if self.bad is None else self.bad + bad
        sums.add(chosen, count, found, wins)

    def _block_work(self, network: FastNetwork, products: bool, mirrored: bool) -> Callable[..., tuple[Tensor, ...]]:
        """The sums of a block of pairs, their winners, and what is no number, from tensors only (see `replayed`)."""
        controlled, choice = self.slopes is not None, self.outputs is not None

        def work(mean: Tensor, centre: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            given = list(rest)
            slopes = given.pop(0) if controlled else None
            outputs = given.pop(0) if choice else None
            deviations, others = given[0], None if mirrored else given[1]
            first, second = self._values(network, mean, deviations, others, outputs)
            lines = None
            if slopes is not None:
                lines = _lines(deviations, slopes), None if others is None else _lines(others, slopes)
            found, wins = block_sums(first, second, lines, centre, products)
            return found, wins, _not_finite(torch.stack([first, second]))

        return work

    def _kind(self, name: str, products: bool) -> tuple[Any, ...]:
        """What else recorded work depends on."""
        controls = self.slopes is not None, self.outputs is not None, self.correction is not None
        return name, products, *controls, *self.sums

    def _estimate(self, products: bool) -> tuple[PairEstimate, Tensor]:
        """The estimates so far, and the tolerance they meet."""
        correction, kinds = self.correction, list(self.sums)
        controlled = self.known is not None
        extra = [] if self.known is None else [self.known]
        if correction is not None:
            extra += [correction.even, correction.even_error, correction.target, correction.target_error]

        def work(centre: Tensor, costs: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            totals, given = rest[: len(kinds)], list(rest[len(kinds) :])
            known = given.pop(0) if controlled else None
            each = []
            for kind, sums in zip(kinds, totals, strict=True):
                mean, second, mean_error, second_error = estimated(sums, known, products, kind)
                each.append(PairEstimate(centre + mean, second, mean_error, second_error))
            found = each[0]
            if len(each) == 2:  # the second kind may be missing for entries that need no more
                counts = [sums[..., 0].sum(1) for sums in totals]
                found = chosen(
                    counts[1] > 0, combined(each[0], each[1], *pair_weights(costs, counts[0], counts[1])), found
                )
            if given:
                found = corrected(found, centre, *given)
            return (
                found.mean,
                found.second,
                found.mean_error,
                found.second_error,
                relative_errors(found, self.noise.dtype),
            )

        totals = [sums.sums for sums in self.sums.values()]
        centre = next(iter(self.sums.values())).centre
        costs = torch.tensor(self.costs, dtype=torch.float64, device=centre.device)
        *found, errors = self.fast.replayed(self._kind("estimate", products), work, centre, costs, *totals, *extra)
        return PairEstimate(*found), errors

    def _draw(self, active: Tensor, pairs: int, mirrored: bool) -> tuple[Tensor, Tensor | None]:
        """Deviations (p, A, n) from the means: of the first sample of a pair; of the second, if it is not mirrored."""
        covariance = self.noise.covariance.entries(active)
        shape = (pairs, len(active))
        first = covariance.draw(shape, self.generator)
        return first, None if mirrored else covariance.draw(shape, self.generator)

    def _values(
        self, network: FastNetwork, mean: Tensor, deviations: Tensor, others: Tensor | None, outputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs (p, A, d) at both inputs of each pair."""
        inputs = torch.stack([mean + deviations, mean - deviations if others is None else mean + others])
        values = network.values(inputs.reshape(-1, *self.noise.event_shape)).reshape(*inputs.shape[:3], -1)
        if outputs is not None:
            values = values.gather(3, outputs.expand(*inputs.shape[:2], -1, -1))
        return values[0].to(self.noise.dtype), values[1].to(self.noise.dtype)

    def _count_bad(self, values: Tensor) -> None:
        found = _not_finite(values)
        self.bad = found if self.bad is None else self.bad + found

    def _require_finite(self, pairs: int) -> None:
        """An error that says how many samples gave no numbers, and which outputs; or another try in float32."""
        assert self.bad is not None
        if not bool(self.bad[0]):
            return
        if self.half is not None:
            raise _Overflow
        where = self.bad[1:].nonzero().squeeze(1).tolist()
        named = ", ".join(map(str, where[:4])) + (", …" if len(where) > 4 else "")
        raise ValueError(
            f"output_moments: {int(self.bad[0])} of {2 * pairs} samples gave NaN or infinite outputs (output "
            f"{named}), so that there are no moments; use less noise, clamp the network's input, or choose other "
            f"outputs="
        )

    def _find_slopes(self, first: Tensor, second: Tensor, goal: Goal, products: bool) -> None:
        """Expected slopes S (E, d, n), from gradients at points of their own, if they are worth their cost.

        With the share v of the outputs' variance that is even in the noise, slopes from K gradients lose about 2v/K of
        the variance they explain, which costs 8v/K more pairs of 1/tolerance² (see `pair_sums`), and BACKWARD·d·K runs
        of the network: the best K follows.
        """
        if not self.model.differentiable or any(x.is_inference() for x in self.model.network.parameters()):
            return
        even, odd = ((first + second) / 2).double().var(0), ((first - second) / 2).double().square().mean(0)
        total = even + odd
        share = float(torch.where(total > 0, even / torch.where(total > 0, total, 1.0), 0.0).mean())
        outputs = first.shape[-1]
        worth = min(goal.tolerance**-2, goal.samples)
        best = math.sqrt(8 * share * worth / (BACKWARD * outputs))
        affordable = 0.25 * worth / (BACKWARD * outputs)
        points = int(min(best + 0.5, affordable, MOST_POINTS))
        points = max(points, 1) if affordable >= 0.5 else 0
        if points == 0 or self.noise.size * outputs * len(self.noise.mean) > SLOPE_NUMBERS:
            return
        try:
            points = points if points == 1 else points // 2 * 2
            slopes = self._expected_slopes(points, outputs)
        except RuntimeError:
            return
        if not bool(torch.isfinite(slopes).all()):
            return
        covariance = self.noise.covariance.to(torch.float64)
        spread = covariance.push_diagonal(slopes.double()).sqrt()  # controls of variance 1, or none
        scaled = (slopes / spread.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0).to(slopes.dtype)
        known = covariance.push(scaled.double()) if products else covariance.push_diagonal(scaled.double())
        self.slopes, self.points = scaled, points
        self.known = known.expand(len(slopes), *known.shape[1:])

    def _expected_slopes(self, points: int, outputs: int) -> Tensor:
        """The average gradient (E, d, n) over points of the noise, mirrored ones; at the mean itself for one point."""
        noise, generator = self.noise, torch.Generator(self.noise.device)
        generator.manual_seed(random_seed(self.seed, "slopes", 0))
        entries = len(noise.mean)
        mean = noise.flat_mean
        if points == 1:
            inputs = mean.unsqueeze(0)
        else:
            half = noise.covariance.draw((points // 2, entries), generator)
            inputs = torch.cat([mean + half, mean - half])
        each = points * (outputs if noise.device.type == "cuda" else 1)
        together = max(1, directions_at_once(noise.device, self.model.largest, noise.dtype.itemsize, None) // each)
        parts = []
        for some in torch.arange(entries, device=noise.device).split(together):
            parts.append(self._gradients(inputs[:, some], some).mean(1))
        return torch.cat(parts)

    def _gradients(self, inputs: Tensor, entries: Tensor) -> Tensor:
        """Gradients (A, K, d, n) of the outputs at K points (K, A, n) of each of A entries.

        One output at a time with one run for all, or on a GPU all at once, each with a run of its own.
        """
        points = len(inputs)
        rows = inputs.reshape(-1, *self.noise.event_shape).detach()
        chosen = None if self.outputs is None else self.outputs[entries].repeat(points, 1)
        count = self.model.outputs if chosen is None else chosen.shape[1]
        if rows.device.type == "cuda":
            each = torch.arange(count, device=rows.device).repeat_interleave(len(rows)).unsqueeze(1)
            each = each if chosen is None else chosen.repeat(count, 1).gather(1, each)
            slopes = self.fast.gradients(rows.repeat(count, *(1,) * (rows.dim() - 1)), each)
            return slopes.reshape(count, points, len(entries), -1).movedim((0, 1, 2), (2, 1, 0))
        with torch.enable_grad():
            x = rows.requires_grad_()
            values = self.fast(x.clone())  # which it may write into
            values = values if chosen is None else values.gather(1, chosen)
            found = [torch.autograd.grad(values[:, k].sum(), x, retain_graph=k + 1 < count)[0] for k in range(count)]
        return torch.stack([slope.reshape(points, len(entries), -1) for slope in found], 2).movedim(0, 1)


def _lines(deviations: Tensor, slopes: Tensor) -> Tensor:
    """The control ℓ = S δ, (p, A, d), of deviations (p, A, n) with slopes (A, d, n)."""
    return torch.matmul(deviations.movedim(0, 1), slopes.mT).movedim(0, 1)


def _not_finite(values: Tensor) -> Tensor:
    """How many samples (..., d) are not finite, and how often each of the d outputs is not, (1 + d)."""
    bad = ~torch.isfinite(values)
    each = bad.flatten(0, -2).sum(0)
    return torch.cat([bad.any(-1).sum().reshape(1), each])


class _Overflow(Exception):
    """Half precision gave something that is not a number."""


def missing_pairs(reached: Tensor, done: Tensor, tolerance: float, most: int) -> Tensor:
    """How many more pairs each input needs, multiples of FOLDS: errors fall as 1/√pairs."""
    share = (reached.double() / tolerance) ** 2
    wanted = torch.where(share > 1, (MARGIN * share).clamp(max=1 + GROWTH) * done, done.double()).clamp(max=most)
    return torch.minimum(((wanted - done) / FOLDS).ceil().long() * FOLDS, most - done).clamp(min=0)

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

from netmoments.gaussian import Gaussian, random_seed
from netmoments.memory import directions_at_once, elements_together
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision
from netmoments.progress import Progress
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
    pair_costs,
    pair_weights,
)
from netmoments.sampling.slopes import SlopeControls, expected_slopes, lines, points_worth

PILOT = 64
"""Pairs of the first round."""
GROWTH = 8
"""A round has at most so many times the pairs of all before: what few pairs say of a variance is not to be trusted."""
MARGIN = 1.05
"""More pairs than the errors so far ask for, so that another round is seldom needed."""
ENOUGH = 0.75
"""A round has the pairs that this share of its inputs still needs at most; the others go on."""
SHORT = 2e-3
"""Seconds of a GPU that are less than another round would take: all inputs get what the neediest needs."""
HALF_SHARE = 0.5
"""Of the tolerance: half precision is used if its correction is known to within this."""
BLOCK = 1024
"""Pairs of one input that are summed at a time on a CPU."""
OVERFLOWED = ", in float32 as float16 overflowed"
"""What is said of it."""
ROUNDING = 16
"""Units in the last place of an output's mean, up to which it is taken not to vary."""


Work = Callable[..., tuple[Tensor, ...]]
"""Of tensors only, so that it can be recorded (see `FastNetwork.replayed`)."""


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
    model: NetworkModel,
    noise: Gaussian,
    outputs: Tensor | None,
    goal: Goal,
    *,
    seed: int,
    products: bool,
    memory_budget: int | None = None,
) -> Adaptive:
    """Moments of the outputs (all, or those with indices (E, k)) for noise with one batch dimension, E inputs.

    As many inputs go together as fit into a piece of work (see `memory`), as many samples through the network as is
    fastest, or as fit into a budget of bytes.
    """
    start, parts = time.perf_counter(), []
    count = model.outputs if outputs is None else outputs.shape[1]
    each = 2 * PILOT * (noise.size + count) + 2 * FOLDS * 9 * (count**2 if products else count)
    together = elements_together("backward", noise.mean, each)
    with torch.inference_mode(False), full_precision():
        for number, some in enumerate(torch.arange(len(noise.mean), device=noise.device).split(together)):
            own = seed if number == 0 else random_seed(seed, "inputs", number)
            chosen_outputs = None if outputs is None else outputs[some]
            work = _Sampling(model, noise.entries(some), chosen_outputs, own, memory_budget)
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
        work.mirrors = False
        return work.until(Goal(1e-12, samples), False, time.perf_counter())


class _Sampling:
    """A network, and the noise that is put into it.

    On a GPU the host would wait longer than the device works, so each step is recorded work on tensors (see
    `FastNetwork.replayed`), and the host reads a few numbers once a round.
    """

    def __init__(
        self, model: NetworkModel, noise: Gaussian, outputs: Tensor | None, seed: int, memory_budget: int | None = None
    ) -> None:
        self.model, self.outputs, self.seed = model, outputs, seed
        self.noise = Gaussian._trusted(noise.mean.detach(), noise.covariance.to(noise.dtype), noise.event_ndim)
        self.mean = self.noise.flat_mean
        self.on_gpu = self.noise.device.type == "cuda"
        self.memory_budget = memory_budget
        self.fast = self._within_budget(fast_network(model))
        half = half_network(model)
        self.half = None if half is None else self._within_budget(half)
        self.mirrors, self.remark = True, ""

    def _within_budget(self, network: FastNetwork) -> FastNetwork:
        """With batches that fit into the budget, where there is one."""
        if self.memory_budget is None:
            return network
        size = self.noise.dtype.itemsize
        fitting = directions_at_once(self.noise.device, self.model.largest, size, self.memory_budget)
        return replace(network, batch=min(network.batch, fitting))

    def until(self, goal: Goal, products: bool, start: float) -> Adaptive:
        """Rounds of pairs until the goal is reached; in half precision if the first round says that it can be.

        `start` is when the work of the goal began.
        """
        try:
            return self._until(goal, products, start)
        except _Overflow:  # all anew
            self.half, self.remark = None, OVERFLOWED
            return self._until(goal, products, start)

    def _until(self, goal: Goal, products: bool, start: float) -> Adaptive:
        stopped: str | None = None
        # not the seed itself: a network whose weights were drawn with that would meet them again
        own = random_seed(self.seed, "samples", 0)
        self.generator = torch.Generator(self.noise.device).manual_seed(own)
        most = max(FOLDS, goal.samples // 2 // FOLDS * FOLDS)
        self.sums: dict[bool, PairSums] = {}
        undecided = self._first_round(most, goal, products)
        if self.on_gpu:
            self.model.look()
        with Progress("sampling", most) as progress:
            shown = 0
            while True:
                estimate, errors = self._estimate(products)
                told = torch.cat([errors, *self._counts(), *undecided]).cpu()
                reached, counts, infinite, decisions = told.split(
                    [*2 * [len(errors)], 1, len(told) - 2 * len(errors) - 1]
                )
                done = counts.long()
                if undecided:
                    self._decide(decisions, goal, products)
                    undecided = ()
                if bool(infinite):
                    self._refuse_infinite(int(done.sum()))
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
        points = 0 if self.slopes is None else self.slopes.points
        runs = 2 * done + points + (2 * self.pilot if self.correction else 0)
        wins = torch.stack([sums.wins for sums in self.sums.values()]).sum(0)
        wins = wins / wins.sum(-1, keepdim=True)
        found = allowing_for_skewness(estimate)
        return Adaptive(found, runs, wins, reached, points, stopped, self.remark, self.share)

    def _counts(self) -> tuple[Tensor, Tensor]:
        """How many pairs of each entry there are, (E,), and how many samples gave no numbers, (1,)."""
        pairs = torch.stack([sums.pairs for sums in self.sums.values()]).sum(0)
        return pairs, self.bad[:1].double()

    def _first_round(self, most: int, goal: Goal, products: bool) -> tuple[Tensor, ...]:
        """A few pairs of all entries, and the slopes; the numbers that decide how to go on (see `_decide`).

        They are mirrored, unless all are to be independent.
        """
        entries, mirrored = len(self.mean), self.mirrors
        self.pilot = PILOT
        if self.on_gpu:  # where they cost next to nothing
            fitting = elements_together("pass", self.mean, 2 * entries * self.noise.size)
            self.pilot = max(PILOT, min(8 * PILOT, 32 * PILOT // entries, fitting) // FOLDS * FOLDS)
        self.pilot = min(self.pilot, most)
        deviations, others = self._draw(None, self.pilot, mirrored)
        given = [x for x in (self.outputs, others) if x is not None]
        given_kind = self.outputs is not None, others is not None, self.half is not None
        centre, *values = self.fast.replayed(("pilot", *given_kind), self._pilot_work(), self.mean, deviations, *given)
        self.slopes = self._slopes(values[0], values[1], goal, products) if mirrored else None
        controls = [] if self.slopes is None else [self.slopes.slopes]
        kind = "sums of pilot", products, mirrored, len(controls), self.half is not None, goal.tolerance
        sums, wins, self.bad, self.costs, decisions, *correction = self.fast.replayed(
            kind, self._pilot_sums_work(products, mirrored, goal), centre, deviations, *controls, *values
        )
        self.correction = tuple(correction)
        self.share = 1.0 if mirrored else 0.0
        self.sums[mirrored] = PairSums(centre, products, mirrored)
        self.sums[mirrored].add(None, sums, wins)
        return self.costs.flatten(), decisions

    def _pilot_work(self) -> Work:
        """Both values of pairs (p, E, d), exact and if there is one in half precision, and before them their mean."""
        fast, half, choice = self.fast, self.half, self.outputs is not None

        def work(mean: Tensor, deviations: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            given = list(rest)
            outputs = given.pop(0) if choice else None
            others = given.pop(0) if given else None
            exact = self._values(fast, mean, deviations, others, outputs)
            low = () if half is None else self._values(half, mean, deviations, others, outputs)
            return ((exact[0] + exact[1]) / 2).mean(0).double(), *exact, *low

        return work

    def _slopes(self, first: Tensor, second: Tensor, goal: Goal, products: bool) -> SlopeControls | None:
        runs = min(goal.tolerance**-2, goal.samples)
        if self.half is not None:  # in runs of float32
            runs *= self.half.cost / self.fast.cost
        points = points_worth(first, second, runs)
        generator = torch.Generator(self.noise.device).manual_seed(random_seed(self.seed, "slopes", 0))
        return expected_slopes(
            self.model, self.fast, self.noise, self.outputs, points, products, generator, self.memory_budget
        )

    def _pilot_sums_work(self, products: bool, mirrored: bool, goal: Goal) -> Work:
        """Sums, winners, what is no number, costs, decisions, and the correction of half precision if there is one.

        Half precision is used if its correction is known well enough; else its correction is 0, and the sums are of
        exact values. The decisions are whether it is used, and whether its values were all numbers.
        """
        controlled, dtype = self.slopes is not None, self.noise.dtype

        def work(centre: Tensor, deviations: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            given = list(rest)
            line = lines(deviations, given.pop(0)) if controlled else None
            first, second, *low = given
            both = None if line is None else (line, None)
            found = [*block_sums(first, second, both, centre, products), not_finite(torch.stack([first, second]))]
            costs = pair_costs(first, second, line) if mirrored else centre.new_ones(2, 2)
            if not low:
                return *found, costs, centre.new_zeros(0)
            rough = CorrectionSums(centre, (first, second), (low[0], low[1]), products)
            left = relative_errors(rough.alone(centre, (first, second), products), dtype)
            used = (left <= HALF_SHARE * goal.tolerance).all()
            in_half = [*block_sums(low[0], low[1], both, centre, products), not_finite(torch.stack(low))]
            found = [torch.where(used, half, exact) for half, exact in zip(in_half, found, strict=True)]
            decisions = torch.stack([used, in_half[2][0] == 0]).double()
            parts = (rough.even, rough.even_error, rough.target, rough.target_error)
            return *found, costs, decisions, *(torch.where(used, part, 0.0) for part in parts)

        return work

    def _decide(self, told: Tensor, goal: Goal, products: bool) -> None:
        """How many of the pairs to mirror, and whether to go on in half precision, from what the first round told."""
        if self.half is not None:
            used, finite = told[4:].bool().tolist()
            if not used:
                self.half, self.correction = None, ()
                self.remark = "" if finite else OVERFLOWED
        if self.mirrors:
            share = PairCosts.of(told[:4].reshape(2, 2)).share
            self.share = share if 0.1 < share < 0.9 else float(round(share))
            if self.share < 1:
                self.sums[False] = PairSums(self.sums[True].centre, products, False)

    def _round(self, missing: Tensor, done: Tensor, most: int, goal: Goal, start: float) -> None:
        """So many more pairs for the entries that miss some, a block at a time."""
        network, entries = self.half or self.fast, int((missing > 0).sum())
        if self.on_gpu:  # few different shapes, so that work can be recorded: all entries, the neediest half, a quarter
            entries = max(1, len(missing) // 2 ** math.ceil(math.log2(len(missing) / entries)))
        active = missing.argsort(descending=True, stable=True)[:entries].sort().values
        wanted = missing[active].sort().values
        left = most - int(done[active].max())
        pairs = int(wanted[-1])
        if 2 * entries * pairs * network.cost > SHORT or not self.on_gpu:
            pairs = int(wanted[int(ENOUGH * (len(wanted) - 1))])
        fitting = elements_together("pass", self.mean, 2 * entries * self.noise.size)
        if self.on_gpu:
            fitting = min(fitting, network.batch // (2 * entries))
            pairs = min(rounded_up(pairs), left)
        else:
            fitting = min(fitting, max(network.batch // (2 * entries), BLOCK // entries))
            pairs = min(pairs, left)
        mirrored = pairs
        if self.share < 1:
            unit = step_of(pairs) if self.on_gpu else FOLDS
            mirrored = min(pairs, round(self.share * pairs / unit) * unit)
        where = active.to(self.noise.device) if entries < len(self.mean) else None
        for kind, count in ((True, mirrored), (False, pairs - mirrored)):
            for block in (powers_of_two if self.on_gpu else even_blocks)(count, max(FOLDS, fitting)):
                if goal.seconds is not None and time.perf_counter() - start > goal.seconds:
                    return
                self._add_block(network, where, block, kind)

    def _add_block(self, network: FastNetwork, where: Tensor | None, count: int, mirrored: bool) -> None:
        """So many pairs of one kind more, of the entries with these indices, or of all."""
        sums = self.sums[mirrored]
        own = [self.mean, sums.centre]
        own += [] if self.slopes is None else [self.slopes.slopes]
        own += [] if self.outputs is None else [self.outputs]
        own = own if where is None else [x[where] for x in own]
        drawn = [x for x in self._draw(where, count, mirrored) if x is not None]
        work, kind = self._block_work(network, sums.products, mirrored), self._kind("block", sums.products)
        found, wins, bad = network.replayed((*kind, mirrored), work, *own, *drawn)
        self.bad = self.bad + bad
        sums.add(where, found, wins)

    def _block_work(self, network: FastNetwork, products: bool, mirrored: bool) -> Work:
        """The sums of a block of pairs, their winners, and what is no number."""
        controlled, choice = self.slopes is not None, self.outputs is not None

        def work(mean: Tensor, centre: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            given = list(rest)
            slopes = given.pop(0) if controlled else None
            outputs = given.pop(0) if choice else None
            deviations, others = given[0], None if mirrored else given[1]
            first, second = self._values(network, mean, deviations, others, outputs)
            both = None
            if slopes is not None:
                both = lines(deviations, slopes), None if others is None else lines(others, slopes)
            found, wins = block_sums(first, second, both, centre, products)
            return found, wins, not_finite(torch.stack([first, second]))

        return work

    def _kind(self, name: str, products: bool) -> tuple[Any, ...]:
        """What else recorded work depends on."""
        controls = self.slopes is not None, self.outputs is not None, len(self.correction)
        return name, products, *controls, *self.sums

    def _estimate(self, products: bool) -> tuple[PairEstimate, Tensor]:
        """The estimates so far, and the tolerance they meet."""
        kinds, dtype = list(self.sums), self.noise.dtype
        controlled = self.slopes is not None
        extra = [*([] if self.slopes is None else [self.slopes.known]), *self.correction]

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
            return found.mean, found.second, found.mean_error, found.second_error, relative_errors(found, dtype)

        totals = [sums.sums for sums in self.sums.values()]
        centre = next(iter(self.sums.values())).centre
        *found, errors = self.fast.replayed(self._kind("estimate", products), work, centre, self.costs, *totals, *extra)
        return PairEstimate(*found), errors

    def _draw(self, where: Tensor | None, pairs: int, mirrored: bool) -> tuple[Tensor, Tensor | None]:
        """Deviations (p, A, n) from the means: of the first sample of a pair; of the second, if it is not mirrored."""
        covariance = self.noise.covariance
        shape = (pairs, len(self.mean))
        if where is not None:
            covariance, shape = covariance.entries(where), (pairs, len(where))
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

    def _refuse_infinite(self, pairs: int) -> None:
        """An error that says how many samples gave no numbers, and which outputs; or another try in float32."""
        if self.half is not None:
            raise _Overflow
        where = self.bad[1:].nonzero().squeeze(1).tolist()
        named = ", ".join(map(str, where[:4])) + (", …" if len(where) > 4 else "")
        raise ValueError(
            f"output_moments: {int(self.bad[0])} of {2 * pairs} samples gave NaN or infinite outputs (output "
            f"{named}), so that there are no moments; use less noise, clamp the network's input, or choose other "
            f"outputs="
        )


def not_finite(values: Tensor) -> Tensor:
    """How many samples (..., d) are not finite, and how often each of the d outputs is not, (1 + d)."""
    bad = ~torch.isfinite(values)
    each = bad.flatten(0, -2).sum(0)
    return torch.cat([bad.any(-1).sum().reshape(1), each])


class _Overflow(Exception):
    """Half precision gave something that is not a number."""


def step_of(pairs: int) -> int:
    """An eighth to a quarter of a number of pairs, a power of two."""
    return max(FOLDS, 2 ** (max(1, pairs).bit_length() - 3))


def rounded_up(pairs: int) -> int:
    """To one of four numbers between any two powers of two."""
    return -(-pairs // step_of(pairs)) * step_of(pairs)


def powers_of_two(count: int, most: int) -> list[int]:
    """A number of pairs as blocks of powers of two up to a limit, so that recorded work comes again; and a rest."""
    blocks, least = [], step_of(count)
    while count > 0:
        rest = count < least and count <= most
        blocks.append(count if rest else 2 ** (min(count, most).bit_length() - 1))
        count -= blocks[-1]
    return blocks


def even_blocks(count: int, most: int) -> list[int]:
    """A number of pairs, a multiple of FOLDS, as blocks of that limit, a multiple of it too, and a rest."""
    block = max(FOLDS, most // FOLDS * FOLDS)
    return [min(block, count - begun) for begun in range(0, count, block)]


def missing_pairs(reached: Tensor, done: Tensor, tolerance: float, most: int) -> Tensor:
    """How many more pairs each input needs, multiples of FOLDS: errors fall as 1/√pairs."""
    share = (reached.double() / tolerance) ** 2
    wanted = torch.where(share > 1, (MARGIN * share).clamp(max=1 + GROWTH) * done, done.double()).clamp(max=most)
    return torch.minimum(((wanted - done) / FOLDS).ceil().long() * FOLDS, most - done).clamp(min=0)

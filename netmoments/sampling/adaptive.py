"""Sampling until a tolerance is met: mirrored and independent pairs of samples, controlled by expected slopes.

A first round of few pairs shows how the outputs vary. From that follow the number of points at which the network is
differentiated for the slopes, the share of pairs to be mirrored, and the number of pairs needed. Further rounds follow
until the errors of all inputs are within the tolerance or a limit is reached.

This module decides how many pairs to draw and when to stop. `fast_network` computes the network's values, `slopes` the
control, `pair_sums` the estimates with their errors, and `two_level` corrects values in low precision.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.checks import random_seed
from netmoments.gaussian import Gaussian
from netmoments.memory import elements_together, inputs_together
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.sampling.estimate import (
    PILOT,
    WIDE_PAIRS,
    WIDENING,
    PairEstimate,
    infinite_outputs,
)
from netmoments.sampling.fast_network import FastNetwork, fast_network, half_network, low_network
from netmoments.sampling.pair_sums import (
    FOLDS,
    SUMS,
    BlockSums,
    Decisions,
    FirstSums,
    PairSums,
    Standing,
    block_sums,
    flat_first_sums,
    wide_residuals_of,
)
from netmoments.sampling.slopes import SlopeControls, expected_slopes, linear_controls, points_worth
from netmoments.sampling.two_level import MOST_SHARE, WORTH, ExactPairs, exact_pairs_worth, exact_share

GROWTH = 8
"""A round has at most so many times the pairs of all before: few pairs say little of a variance."""
RESERVE = 1.05
"""A round has so many times the pairs that the errors so far ask for, so that another round is seldom needed."""
ENOUGH = 0.75
"""A round ends when this share of its inputs have the pairs they need; the others go on in the next."""
SHORT = 2e-3
"""A round on a GPU that takes fewer seconds gives all inputs what the neediest needs: another one would take longer."""
BLOCK = 1024
"""Pairs that are summed at a time on a CPU, at most; fewer if their outputs would not stay in its cache."""
ABANDONED = ", in float32 as {} {}"
"""The remark for low precision that overflowed or failed."""
CORRECTED = ", in bfloat16, corrected by a share of them in float32"


@dataclass(frozen=True)
class Goal:
    """When to stop: at the tolerance, or at a limit on the samples of each input or the seconds of the whole call."""

    tolerance: float
    samples: int
    seconds: float | None = None

    @classmethod
    def all_samples(cls, count: int) -> Goal:
        """So many samples, whatever they show: a tolerance that none can meet."""
        return cls(1e-12, count)


@dataclass(frozen=True, eq=False)
class SampledToGoal:
    """What sampling found for E inputs, and what it took."""

    estimate: PairEstimate
    samples: Tensor
    """Runs of the network for each input, (E,): both samples of every pair, and the points of gradients."""
    wins: Tensor
    """Shares (E, d) of the samples in which each output was the largest."""
    reached: Tensor
    """The tolerance that was reached for each input, (E,)."""
    stopped: str | None
    """The limit that ended the sampling before the tolerance was met."""
    description: str
    """Which samples and which control were used, in words."""


def described(mirrored_share: float, points: int, remark: str) -> str:
    """In words: the share of mirrored pairs, gradients at so many points, and a last remark."""
    kinds = {1.0: "mirrored pairs of samples", 0.0: "independent samples"}
    kind = kinds.get(mirrored_share, f"samples, {mirrored_share:.0%} in mirrored pairs")
    if points == 0:
        return kind + remark
    where = "at the mean" if points == 1 else f"from gradients at {points} points"
    return f"{kind}, controlled by expected slopes {where}{remark}"


def sampled_to_tolerance(
    model: NetworkModel,
    noise: Gaussian,
    outputs: Tensor | None,
    goal: Goal,
    *,
    seed: int,
    products: bool,
) -> SampledToGoal:
    """Moments of the outputs (all, or those with indices (E, k)) for noise with one batch dimension, E inputs.

    `products` asks for all covariances, else there are variances only. As many inputs are sampled together as fit into
    a piece of work (see `memory`), and as many samples go through the network at a time as is fastest, or as fit into a
    budget of bytes.
    """
    start = time.perf_counter()
    count = model.outputs if outputs is None else outputs.shape[1]
    together = inputs_together(noise.mean, PILOT, count, products, FOLDS * SUMS)
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        if len(noise.mean) <= together:
            return _Sampling(model, noise, outputs, products, seed).until(goal, start)
        groups = []
        for number, inputs in enumerate(torch.arange(len(noise.mean), device=noise.device).split(together)):
            group_seed = seed if number == 0 else random_seed(seed, "inputs", number)
            group_outputs = None if outputs is None else outputs[inputs]
            sampling = _Sampling(model, noise.entries(inputs), group_outputs, products, group_seed)
            groups.append(sampling.until(goal, start))
    return joined(groups)


def joined(groups: list[SampledToGoal]) -> SampledToGoal:
    """The results of several groups of inputs as one."""
    estimate = PairEstimate(*map(torch.cat, zip(*(group.estimate for group in groups), strict=True)))
    samples, wins, reached = (
        torch.cat([getattr(group, name) for group in groups]) for name in ("samples", "wins", "reached")
    )
    stopped = next((group.stopped for group in groups if group.stopped is not None), None)
    return replace(groups[0], estimate=estimate, samples=samples, wins=wins, reached=reached, stopped=stopped)


def sampled_plainly(model: NetworkModel, noise: Gaussian, outputs: Tensor, samples: int, *, seed: int) -> SampledToGoal:
    """Means and variances from so many independent samples, without covariances: for any number of outputs."""
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        sampling = _Sampling(model, noise, outputs, False, seed, mirrored_share=0.0)
        return sampling.until(Goal.all_samples(samples), time.perf_counter())


class _Sampling:
    """The sampling of one network under one noise: rounds of pairs, their sums, and the decisions between rounds.

    On a GPU, asking for work takes longer than doing it. Each step is therefore work on tensors that is recorded once
    and replayed (`FastNetwork.replayed`), and the host reads a few numbers once a round.
    """

    def __init__(
        self,
        model: NetworkModel,
        noise: Gaussian,
        outputs: Tensor | None,
        products: bool,
        seed: int,
        mirrored_share: float = 1.0,
    ) -> None:
        self.model, self.noise, self.outputs, self.products = model, noise, outputs, products
        self.mean, self.seed = noise.mean.detach(), seed
        self.on_gpu = noise.device.type == "cuda"
        self.half = half_network(model)
        self.fast = fast_network(model)
        self.slopes = SlopeControls()
        self.low: FastNetwork | None = None
        """On a CPU, the network in low precision, if most pairs go through that; `exact` are those that correct it."""
        self.exact: ExactPairs | None = None
        self.never_low = noise.device.type != "cpu"
        self.mirrored_share = mirrored_share
        """The share of pairs to be mirrored; 0 from the start if all are to be independent."""
        self.remark = ""

    def until(self, goal: Goal, start: float) -> SampledToGoal:
        """Sample until the goal is reached; `start` is when the call began.

        If values in low precision turn out to be unusable, everything is done again in float32.
        """
        mirrored_share = self.mirrored_share
        try:
            return self._rounds(goal, start)
        except _Abandoned as why:
            name = "bfloat16" if self.half is None else "float16"
            self.half, self.low, self.exact, self.never_low = None, None, None, True
            self.mirrored_share, self.remark = mirrored_share, ABANDONED.format(name, why)
            return self._rounds(goal, start)

    def _rounds(self, goal: Goal, start: float) -> SampledToGoal:
        # not the seed itself: a network whose weights were drawn with that seed would meet them again as noise
        self.generator = torch.Generator(self.noise.device).manual_seed(random_seed(self.seed, "samples", 0))
        most = max(FOLDS, goal.samples // 2 // FOLDS * FOLDS)
        self.wide_pairs = WIDE_PAIRS if self.mirrored_share == 1 and most >= PILOT else 0
        most -= self.wide_pairs
        stopped = None
        with progress_bar("sampling", most) as show:
            standing = self._first_round(most, goal)
            first_pairs = int(standing.pairs[0])
            while True:
                if standing.infinite:
                    self._refuse_infinite(standing)
                show(int(standing.pairs.min()))
                missing = missing_pairs(standing.reached, standing.pairs, goal.tolerance, most)
                if not bool(missing.any()):
                    if bool((standing.reached > goal.tolerance).any()):
                        stopped = f"the limit of {goal.samples:,} samples"
                    break
                if goal.seconds is not None and time.perf_counter() - start > goal.seconds:
                    stopped = f"the limit of {goal.seconds:g} seconds"
                    break
                if self.exact is not None:
                    spread = _spread(standing)
                    self.exact.raise_share(spread, standing.estimate, self.noise.dtype, goal.tolerance, most)
                self._round(missing, most - standing.pairs, goal, start)
                if self.exact is not None:
                    self.sums.correction = self.exact.correction()
                standing = self.sums.standing(self.fast.replayed)
        runs = 2 * (standing.pairs + self.wide_pairs) + self.slopes.points
        wins = self.sums.wins / self.sums.wins.sum(-1, keepdim=True)
        if self.exact is not None:
            runs, wins = runs + 2 * self.exact.pairs.long(), self.exact.shares_of_wins(self.sums.wins)
        elif self.sums.correction:
            runs = runs + 2 * first_pairs
        description = described(self.mirrored_share, self.slopes.points, self.remark)
        return SampledToGoal(standing.estimate, runs, wins, standing.reached, stopped, description)

    def _first_round(self, most: int, goal: Goal) -> Standing:
        """Run a few pairs of all inputs, take the slopes, and decide from them: which share of the pairs to mirror from
        now on, and whether to go on in low precision.
        """
        mirrored = self.mirrored_share == 1
        deviations, wide_deviations = self._draw(None, self._first_pairs(most), mirrored), self._draw_wide()
        values = self._first_values(deviations, wide_deviations)
        half_values: tuple[Tensor, ...] = ()
        plain_runs = min(goal.tolerance**-2, goal.samples)
        if self.half is not None:
            half_values = self.half.replayed("pairs", self.half.pairs, self.mean, *deviations, self.outputs)
            plain_runs *= self.half.cost / self.fast.cost  # as many in float32 would take as long
        if mirrored:
            self.slopes = expected_slopes(
                self.model, self.fast, self.noise, self.outputs, points_worth(*values.exact, plain_runs),
                products=self.products, seed=self.seed,
            )  # fmt: skip
        wide = None
        if values.of_wide_pairs is not None:
            (wide,) = self.fast.replayed(
                "wide", wide_residuals_of, self.slopes.slopes, wide_deviations, *values.of_wide_pairs
            )
        kind = (self.products, mirrored, goal.tolerance)
        found = FirstSums.of(
            self.fast.replayed(
                ("first sums", *kind), partial(flat_first_sums, *kind),
                self.slopes.slopes, wide, deviations[0], *values.exact, *half_values,
            )
        )  # fmt: skip
        self.sums = PairSums(found.centre, self.noise.dtype, self.products, self.slopes.known, found.costs)
        self.sums.correction = found.correction
        self.sums.wide = wide
        if not mirrored:
            self.sums.heavy = 0.0
        self.sums.add(mirrored, None, found.block)
        if self.on_gpu:
            self.model.look()
        standing = self.sums.standing(self.fast.replayed, found.decisions)
        decided = Decisions(*standing.decisions.tolist())
        share = decided.mirrored_share
        self.mirrored_share = share if 0.1 < share < 0.9 else float(round(share))
        if self.half is not None and not decided.half_used:
            self.half, self.sums.correction = None, None
            self.remark = "" if decided.half_finite else ABANDONED.format("float16", "overflowed")
        if not self.never_low and mirrored and self.half is None:
            standing = self._in_low_precision(standing, deviations, values.exact, most, goal)
        return standing

    def _first_pairs(self, most: int) -> int:
        """How many pairs the first round has, beside those at wider noise."""
        pairs, inputs = PILOT, len(self.mean)
        if self.on_gpu:  # more of them cost next to nothing
            fitting = elements_together("pass", self.mean, 2 * inputs * self.noise.size)
            pairs = max(PILOT, min(8 * PILOT, 32 * PILOT // inputs, fitting) // FOLDS * FOLDS)
        return min(pairs - self.wide_pairs, most)

    def _in_low_precision(
        self,
        standing: Standing,
        deviations: tuple[Tensor, Tensor | None],
        exact: tuple[Tensor, Tensor],
        most: int,
        goal: Goal,
    ) -> Standing:
        """Go on in low precision if that is cheaper for what is still to be done (see `two_level`).

        The standing returned is then that of the first pairs in low precision, corrected by the exact ones.
        """
        pairs, spread = len(exact[0]), _spread(standing)
        remaining_runs = 2 * len(self.mean) * (min(spread / goal.tolerance**2, most) - pairs)
        if standing.infinite or not remaining_runs * self.fast.cost > WORTH:
            return standing
        if exact_share(spread, 0.0, goal.tolerance, most) > MOST_SHARE:
            return standing
        low = low_network(self.model)
        if low is None:
            return standing
        try:
            values = low.pairs(self.mean, *deviations, self.outputs)
        except Exception:  # it fails on these samples, though not on those by which it was tuned
            return standing
        exact_pairs = ExactPairs(self.sums.centre, standing.estimate.second)
        exact_pairs.take(None, pairs)
        exact_pairs.add(None, exact, values)
        costs, difference = (self.fast.cost, low.cost), exact_pairs.difference(standing.estimate, self.noise.dtype)
        share, least = exact_pairs_worth(spread, difference, goal.tolerance, (pairs, most), costs)
        if share == 0:
            return standing
        exact_pairs.share, exact_pairs.least = share, least
        sums = PairSums(self.sums.centre, self.noise.dtype, self.products, self.slopes.known, self.sums.costs)
        sums.wide = self.sums.wide
        control = linear_controls(self.slopes.slopes, *deviations)
        sums.add(True, None, block_sums(values[0], values[1], control, sums.centre, self.products))
        sums.correction = exact_pairs.correction()
        self.low, self.exact, self.sums, self.remark = low, exact_pairs, sums, CORRECTED
        return sums.standing(self.fast.replayed)

    def _round(self, missing: Tensor, left: Tensor, goal: Goal, start: float) -> None:
        """Draw the missing pairs (E,), block by block, for the inputs that need some; at most those `left` (E,)."""
        network, inputs = self.half or self.low or self.fast, int((missing > 0).sum())
        if self.on_gpu:  # few shapes, so that work can be recorded: all inputs, the neediest half, a quarter, …
            inputs = max(1, len(missing) // 2 ** math.ceil(math.log2(len(missing) / inputs)))
        active = missing.argsort(descending=True, stable=True)[:inputs].sort().values
        wanted = missing[active].sort().values
        pairs = int(wanted[-1])
        if 2 * inputs * pairs * network.cost > SHORT or not self.on_gpu:
            pairs = int(wanted[int(ENOUGH * (len(wanted) - 1))])
        fitting = elements_together("pass", self.mean, 2 * inputs * self.noise.size)
        if self.on_gpu:
            fitting = min(fitting, network.batch // (2 * inputs))
            pairs = rounded_up(pairs)
        else:
            summed = elements_together("cache", self.mean, 2 * inputs * self.sums.centre.shape[1])
            fitting = min(fitting, max(network.batch // (2 * inputs), min(BLOCK // inputs, summed)))
        pairs = min(pairs, int(left[active].min()))
        mirrored = pairs
        if self.mirrored_share < 1:
            unit = step_of(pairs) if self.on_gpu else FOLDS
            mirrored = min(pairs, round(self.mirrored_share * pairs / unit) * unit)
        where = active.to(self.noise.device) if inputs < len(self.mean) else None
        blocks_of = powers_of_two if self.on_gpu else even_blocks
        for is_mirrored, count in ((True, mirrored), (False, pairs - mirrored)):
            for block in blocks_of(count, max(FOLDS, fitting)):
                if goal.seconds is not None and time.perf_counter() - start > goal.seconds:
                    return
                self._add_block(network, where, block, is_mirrored)

    def _add_block(self, network: FastNetwork, where: Tensor | None, count: int, mirrored: bool) -> None:
        """Draw and add `count` pairs of one kind for the inputs with indices `where`, or for all."""
        given: list[Tensor | None] = [self.mean, self.sums.centre, self.slopes.slopes, self.outputs]
        if where is not None:
            given = [None if x is None else x[where] for x in given]
        deviations = self._draw(where, count, mirrored)
        if self.exact is not None:
            block = self._with_exact_pairs(self.exact, network, where, given, deviations)
        else:
            work = partial(_sums_of_block, network, self.products)
            block = BlockSums(*network.replayed(("block", self.products), work, *given, *deviations))
        self.sums.add(mirrored, where, block)

    def _with_exact_pairs(
        self,
        exact: ExactPairs,
        network: FastNetwork,
        where: Tensor | None,
        given: list[Tensor | None],
        deviations: tuple[Tensor, Tensor | None],
    ) -> BlockSums:
        """The sums of pairs in low precision, some of which are run exactly as well."""
        mean, centre, slopes, outputs = given
        assert mean is not None
        assert centre is not None
        try:
            values = network.pairs(mean, *deviations, outputs)
        except Exception as error:
            raise _Abandoned("failed") from error
        count = exact.take(where, len(deviations[0]))
        if count > 0:
            first, others = deviations
            exact_values = self.fast.pairs(mean, first[:count], None if others is None else others[:count], outputs)
            self.sums.bad[0] += sum(int((~x.isfinite()).any(-1).sum()) for x in exact_values)
            exact.add(where, exact_values, (values[0][:count], values[1][:count]))
        return block_sums(values[0], values[1], linear_controls(slopes, *deviations), centre, self.products)

    def _first_values(self, deviations: tuple[Tensor, Tensor | None], wide_deviations: Tensor | None) -> _FirstValues:
        """The outputs at the first pairs, and from the same run those at wide pairs.

        If the network refuses inputs at wider noise, which the noise itself would hardly produce, there are no wide
        pairs.
        """
        if wide_deviations is None:
            first, second = self.fast.replayed("pairs", self.fast.pairs, self.mean, *deviations, self.outputs)
            return _FirstValues((first, second))
        pairs = len(deviations[0])
        try:
            first, second = self.fast.replayed(
                "pairs", self.fast.pairs, self.mean, torch.cat([deviations[0], wide_deviations]), None, self.outputs
            )
        except Exception:
            self.wide_pairs = 0
            return self._first_values(deviations, None)
        return _FirstValues((first[:pairs], second[:pairs]), (first[pairs:], second[pairs:]))

    def _draw(self, where: Tensor | None, pairs: int, mirrored: bool) -> tuple[Tensor, Tensor | None]:
        """Deviations (p, A, n) from the means: of the first samples of pairs; of the second, unless mirrored."""
        covariance = self.noise.covariance
        shape = (pairs, len(self.mean))
        if where is not None:
            covariance, shape = covariance.entries(where), (pairs, len(where))
        first = covariance.draw(shape, self.generator)
        return first, None if mirrored else covariance.draw(shape, self.generator)

    def _draw_wide(self) -> Tensor | None:
        """Deviations (p, E, n) at wider noise, if wanted; they have a generator of their own."""
        if self.wide_pairs == 0:
            return None
        generator = torch.Generator(self.noise.device).manual_seed(random_seed(self.seed, "wide", 0))
        return WIDENING * self.noise.covariance.draw((self.wide_pairs, len(self.mean)), generator)

    def _refuse_infinite(self, standing: Standing) -> None:
        """Raise an error that says how many samples gave no numbers, and which outputs; or try again in float32."""
        if self.half is not None or self.low is not None:
            raise _Abandoned("overflowed")
        raise infinite_outputs(self.sums.bad, 2 * int(standing.pairs.sum()))


class _FirstValues(NamedTuple):
    """Outputs of E inputs at both samples of each of the first pairs, without low precision."""

    exact: tuple[Tensor, Tensor]
    """(p, E, d) each."""
    of_wide_pairs: tuple[Tensor, Tensor] | None = None
    """(w, E, d) each; None without wide pairs."""


class _Abandoned(Exception):
    """Low precision "overflowed" or "failed", as the message says."""


def _spread(standing: Standing) -> float:
    """a of `two_level`: the squared error that the pairs so far leave, times their number, averaged over the inputs."""
    return float((standing.reached.square() * standing.pairs).mean())


def _sums_of_block(
    network: FastNetwork,
    products: bool,
    mean: Tensor,
    centre: Tensor,
    slopes: Tensor | None,
    outputs: Tensor | None,
    deviations: Tensor,
    others: Tensor | None,
) -> BlockSums:
    """`block_sums` of pairs that are run through a network."""
    first, second = network.pairs(mean, deviations, others, outputs)
    return block_sums(first, second, linear_controls(slopes, deviations, others), centre, products)


def missing_pairs(reached: Tensor, done: Tensor, tolerance: float, most: int) -> Tensor:
    """How many more pairs each input needs (E,), multiples of FOLDS, as errors fall as 1/√pairs.

    `reached` (E,) is the tolerance that the pairs `done` (E,) meet; there may be `most` in all.
    """
    ratio = (reached.double() / tolerance) ** 2
    wanted = torch.where(ratio > 1, (RESERVE * ratio).clamp(max=1 + GROWTH) * done, done.double()).clamp(max=most)
    return torch.minimum(((wanted - done) / FOLDS).ceil().long() * FOLDS, most - done).clamp(min=0)


def even_blocks(count: int, most: int) -> list[int]:
    """`count` pairs, a multiple of FOLDS, in blocks of at most `most`, multiples of FOLDS too."""
    block = max(FOLDS, most // FOLDS * FOLDS)
    return [min(block, count - begun) for begun in range(0, count, block)]


def powers_of_two(count: int, most: int) -> list[int]:
    """`count` pairs in blocks of powers of two up to `most`, so that recorded work recurs, and a rest."""
    blocks, least = [], step_of(count)
    while count > 0:
        is_rest = count < least and count <= most
        blocks.append(count if is_rest else 2 ** (min(count, most).bit_length() - 1))
        count -= blocks[-1]
    return blocks


def rounded_up(pairs: int) -> int:
    """The next multiple of `step_of(pairs)`, so that few different numbers of pairs occur, and recorded work recurs."""
    return -(-pairs // step_of(pairs)) * step_of(pairs)


def step_of(pairs: int) -> int:
    """A power of two that is an eighth to a quarter of the number of pairs."""
    return max(FOLDS, 2 ** (max(1, pairs).bit_length() - 3))

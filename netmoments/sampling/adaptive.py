"""As many samples as a tolerance needs: mirrored and independent pairs, with expected slopes as control.

A first few pairs say how the outputs vary; from that follows at how many points the network is differentiated for the
slopes, how many of the pairs should be mirrored, and how many are needed. More are drawn, in a few rounds, until the
errors of all inputs are within the tolerance or a limit is reached.

Here it is decided how many pairs are drawn, and when to stop. `fast_network` gives the network's values at them,
`slopes` the control, and `pair_sums` keeps what is needed of the values and says where the sampling stands.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from netmoments.gaussian import Gaussian, random_seed
from netmoments.memory import elements_together
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.sampling.fast_network import FastNetwork, fast_network, half_network, low_network
from netmoments.sampling.pair_sums import (
    FOLDS,
    PairEstimate,
    PairSums,
    Standing,
    block_sums,
    first_sums,
    lines,
    spread_of_wide,
)
from netmoments.sampling.rare_events import WIDE_PAIRS, WIDENING
from netmoments.sampling.slopes import SlopeControls, expected_slopes, points_worth
from netmoments.sampling.two_level import MOST_SHARE, WORTH, ExactPairs, exact_pairs_worth, exact_share

PILOT = 64
"""Pairs of the first round; WIDE_PAIRS of them are at wider noise, and only say what may be missed (`rare_events`)."""
GROWTH = 8
"""A round has at most so many times the pairs of all before: what few pairs say of a variance is not to be trusted."""
MARGIN = 1.05
"""More pairs than the errors so far ask for, so that another round is seldom needed."""
ENOUGH = 0.75
"""A round has the pairs that this share of its inputs still needs at most; the others go on."""
SHORT = 2e-3
"""Seconds of a GPU that are less than another round would take: all inputs get what the neediest needs."""
BLOCK = 1024
"""Pairs of one input that are summed at a time on a CPU."""
GIVEN_UP = ", in float32 as {} {}"
"""What is said of low precision that overflowed or failed."""
CORRECTED = ", in bfloat16, corrected by a share of them in float32"


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
    stopped: str | None
    """What ended the sampling before the tolerance was met."""
    how: str
    """Which samples and which control, in words."""


def described(share: float, points: int, remark: str) -> str:
    """How it was sampled, in words: the share of mirrored pairs, gradients at so many points, and a last remark."""
    kinds = {1.0: "mirrored pairs of samples", 0.0: "independent samples"}
    kind = kinds.get(share, f"samples, {share:.0%} in mirrored pairs")
    if points == 0:
        return kind + remark
    where = "at the mean" if points == 1 else f"from gradients at {points} points"
    return f"{kind}, controlled by expected slopes {where}{remark}"


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
    start = time.perf_counter()
    count = model.outputs if outputs is None else outputs.shape[1]
    each = 2 * PILOT * (noise.size + count) + 2 * FOLDS * 9 * (count**2 if products else count)
    together = elements_together("backward", noise.mean, each)
    with torch.inference_mode(False), full_precision():
        if len(noise.mean) <= together:
            return _Sampling(model, noise, outputs, products, seed, memory_budget).until(goal, start)
        parts = []
        for number, some in enumerate(torch.arange(len(noise.mean), device=noise.device).split(together)):
            own = seed if number == 0 else random_seed(seed, "inputs", number)
            chosen = None if outputs is None else outputs[some]
            work = _Sampling(model, noise.entries(some), chosen, products, own, memory_budget)
            parts.append(work.until(goal, start))
    return joined(parts)


def joined(parts: list[Adaptive]) -> Adaptive:
    """What was found for several groups of inputs, as one."""
    estimate = PairEstimate(*map(torch.cat, zip(*(part.estimate for part in parts), strict=True)))
    samples, wins, reached = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("samples", "wins", "reached")
    )
    stopped = next((part.stopped for part in parts if part.stopped is not None), None)
    return replace(parts[0], estimate=estimate, samples=samples, wins=wins, reached=reached, stopped=stopped)


@torch.no_grad()
def sampled_plainly(model: NetworkModel, noise: Gaussian, outputs: Tensor, samples: int, *, seed: int) -> Adaptive:
    """Means and variances from so many independent samples, without covariances: for any number of outputs."""
    with torch.inference_mode(False), full_precision():
        work = _Sampling(model, noise, outputs, False, seed)
        work.share = 0.0
        return work.until(Goal(1e-12, samples), time.perf_counter())


class _Sampling:
    """A network, and the noise that is put into it.

    On a GPU the host would wait longer than the device works, so each step is recorded work on tensors (see
    `FastNetwork.replayed`), and the host reads a few numbers once a round.
    """

    def __init__(
        self,
        model: NetworkModel,
        noise: Gaussian,
        outputs: Tensor | None,
        products: bool,
        seed: int,
        memory_budget: int | None = None,
    ) -> None:
        self.model, self.noise, self.outputs, self.products = model, noise, outputs, products
        self.mean, self.seed, self.memory_budget = noise.mean.detach(), seed, memory_budget
        self.on_gpu = noise.device.type == "cuda"
        self.half = half_network(model, memory_budget)
        self.fast = fast_network(model, memory_budget)
        self.slopes = SlopeControls()
        self.low: FastNetwork | None = None
        """On a CPU, the network in low precision, if most pairs are of that; `exact` are those that correct it."""
        self.exact: ExactPairs | None = None
        self.never_low = noise.device.type != "cpu"
        self.share = 1.0
        """Of the pairs, those to be mirrored; 0 from the start if all are to be independent."""
        self.remark = ""

    def until(self, goal: Goal, start: float) -> Adaptive:
        """Rounds of pairs until the goal is reached; in half precision if the first round says that it can be.

        `start` is when the work of the goal began.
        """
        share = self.share
        try:
            return self._rounds(goal, start)
        except _GivenUp as why:  # all anew
            name = "bfloat16" if self.half is None else "float16"
            self.half, self.low, self.exact, self.never_low = None, None, None, True
            self.share, self.remark = share, GIVEN_UP.format(name, why)
            return self._rounds(goal, start)

    def _rounds(self, goal: Goal, start: float) -> Adaptive:
        # not the seed itself: a network whose weights were drawn with that would meet them again
        own = random_seed(self.seed, "samples", 0)
        self.generator = torch.Generator(self.noise.device).manual_seed(own)
        most = max(FOLDS, goal.samples // 2 // FOLDS * FOLDS)
        self.wide_pairs = WIDE_PAIRS if self.share == 1 and most >= PILOT else 0
        most -= self.wide_pairs
        stopped = None
        with progress_bar("sampling", most) as show:
            found = self._first_round(most, goal)
            pilot = int(found.pairs[0])
            while True:
                if found.infinite:
                    self._refuse_infinite(found)
                show(int(found.pairs.min()))
                missing = missing_pairs(found.reached, found.pairs, goal.tolerance, most)
                if not bool(missing.any()):
                    if bool((found.reached > goal.tolerance).any()):
                        stopped = f"the limit of {goal.samples:,} samples"
                    break
                if goal.seconds is not None and time.perf_counter() - start > goal.seconds:
                    stopped = f"the limit of {goal.seconds:g} seconds"
                    break
                if self.exact is not None:
                    self.exact.watch(found, self.noise.dtype, goal.tolerance, most)
                self._round(missing, most - found.pairs, goal, start)
                if self.exact is not None:
                    self.sums.correction = self.exact.correction()
                found = self.sums.standing(self.fast.replayed)
        runs = 2 * (found.pairs + self.wide_pairs) + self.slopes.points
        wins = self.sums.wins / self.sums.wins.sum(-1, keepdim=True)
        if self.exact is not None:
            runs, wins = runs + 2 * self.exact.pairs.long(), self.exact.shares_of_wins(self.sums.wins)
        elif self.sums.correction:
            runs = runs + 2 * pilot
        how = described(self.share, self.slopes.points, self.remark)
        return Adaptive(found.estimate, runs, wins, found.reached, stopped, how)

    def _first_round(self, most: int, goal: Goal) -> Standing:
        """A few pairs of all entries, the slopes, and what these decide: how many of the pairs to mirror from now on,
        and whether to go on in half precision.
        """
        entries, mirrored = len(self.mean), self.share == 1
        pairs = PILOT
        if self.on_gpu:  # where they cost next to nothing
            fitting = elements_together("pass", self.mean, 2 * entries * self.noise.size)
            pairs = max(PILOT, min(8 * PILOT, 32 * PILOT // entries, fitting) // FOLDS * FOLDS)
        pairs = min(pairs - self.wide_pairs, most)
        drawn, wide = self._draw(None, pairs, mirrored), self._draw_wide()
        first, second, *wide_values = self._first_values(drawn, wide)
        low: tuple[Tensor, ...] = ()
        runs = min(goal.tolerance**-2, goal.samples)
        if self.half is not None:
            low = self.half.replayed("pairs", self.half.pairs, self.mean, *drawn, self.outputs)
            runs *= self.half.cost / self.fast.cost  # in runs of float32
        if mirrored:
            self.slopes = expected_slopes(
                self.model, self.fast, self.noise, self.outputs, points_worth(first, second, runs),
                products=self.products, seed=self.seed, memory_budget=self.memory_budget,
            )  # fmt: skip
        spread = None
        if wide_values:
            (spread,) = self.fast.replayed("wide", spread_of_wide, self.slopes.slopes, wide, *wide_values)
        kind = "first sums", self.products, mirrored, goal.tolerance
        work = partial(first_sums, self.products, mirrored, goal.tolerance)
        given = self.slopes.slopes, spread, drawn[0], first, second, *low
        centre, sums, wins, bad, costs, decisions, *correction = self.fast.replayed(kind, work, *given)
        self.sums = PairSums(centre, self.noise.dtype, self.products, self.slopes.known, costs)
        self.sums.correction = tuple(correction)
        self.sums.wide = spread
        if not mirrored:
            self.sums.heavy = 0.0
        self.sums.add(mirrored, None, sums, wins, bad)
        if self.on_gpu:
            self.model.look()
        found = self.sums.standing(self.fast.replayed, decisions)
        share, *of_half = found.told.tolist()
        self.share = share if 0.1 < share < 0.9 else float(round(share))
        if self.half is not None and not of_half[0]:
            self.half, self.sums.correction = None, ()
            self.remark = "" if of_half[1] else GIVEN_UP.format("float16", "overflowed")
        if not self.never_low and mirrored and self.half is None:
            found = self._in_low_precision(found, drawn, (first, second), most, goal)
        return found

    def _in_low_precision(
        self, found: Standing, drawn: tuple[Tensor, Tensor | None], exact: tuple[Tensor, Tensor], most: int, goal: Goal
    ) -> Standing:
        """Where the first exact pairs leave it; or where the same in low precision does, if that is cheaper for what is
        still to be done (see `two_level`).
        """
        pairs = len(exact[0])
        spread = float((found.reached.square() * found.pairs).mean())
        still = 2 * len(self.mean) * (min(spread / goal.tolerance**2, most) - pairs)
        if found.infinite or not still * self.fast.cost > WORTH:
            return found
        if exact_share(spread, 0.0, goal.tolerance, most) > MOST_SHARE:
            return found
        low = low_network(self.model, self.memory_budget)
        if low is None:
            return found
        try:
            values = low.pairs(self.mean, *drawn, self.outputs)
        except Exception:  # of these samples, though not of those that it was tuned by: exactly then
            return found
        beside = ExactPairs(self.sums.centre, found.estimate.second)
        beside.take(None, pairs)
        beside.add(None, exact, (values[0], values[1]))
        costs, difference = (self.fast.cost, low.cost), beside.spread_of(found.estimate, self.noise.dtype)
        beside.share, beside.least = exact_pairs_worth(spread, difference, goal.tolerance, (pairs, most), costs)
        if beside.share == 0:
            return found
        sums = PairSums(self.sums.centre, self.noise.dtype, self.products, self.slopes.known, self.sums.costs)
        sums.wide = self.sums.wide
        sums.add(
            True, None, *block_sums(values[0], values[1], lines(self.slopes.slopes, *drawn), sums.centre, self.products)
        )
        sums.correction = beside.correction()
        self.low, self.exact, self.sums, self.remark = low, beside, sums, CORRECTED
        return sums.standing(self.fast.replayed)

    def _round(self, missing: Tensor, left: Tensor, goal: Goal, start: float) -> None:
        """So many more pairs (E,) for the entries that miss some, a block at a time, and no more than are left."""
        network, entries = self.half or self.low or self.fast, int((missing > 0).sum())
        if self.on_gpu:  # few different shapes, so that work can be recorded: all entries, the neediest half, a quarter
            entries = max(1, len(missing) // 2 ** math.ceil(math.log2(len(missing) / entries)))
        active = missing.argsort(descending=True, stable=True)[:entries].sort().values
        wanted = missing[active].sort().values
        pairs = int(wanted[-1])
        if 2 * entries * pairs * network.cost > SHORT or not self.on_gpu:
            pairs = int(wanted[int(ENOUGH * (len(wanted) - 1))])
        fitting = elements_together("pass", self.mean, 2 * entries * self.noise.size)
        if self.on_gpu:
            fitting = min(fitting, network.batch // (2 * entries))
            pairs = rounded_up(pairs)
        else:
            fitting = min(fitting, max(network.batch // (2 * entries), BLOCK // entries))
        pairs = min(pairs, int(left[active].min()))
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
        own: list[Tensor | None] = [self.mean, self.sums.centre, self.slopes.slopes, self.outputs]
        if where is not None:
            own = [None if x is None else x[where] for x in own]
        drawn = self._draw(where, count, mirrored)
        if self.exact is not None:
            self.sums.add(mirrored, where, *self._with_exact_ones(self.exact, network, where, own, drawn))
            return
        work = partial(_sums_of_block, network, self.products)
        found = network.replayed(("block", self.products), work, *own, *drawn)
        self.sums.add(mirrored, where, *found)

    def _with_exact_ones(
        self,
        exact: ExactPairs,
        network: FastNetwork,
        where: Tensor | None,
        own: list[Tensor | None],
        drawn: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, ...]:
        """The sums of pairs in low precision; some of them are run exactly, too."""
        mean, centre, slopes, outputs = own
        assert mean is not None
        assert centre is not None
        try:
            values = network.pairs(mean, *drawn, outputs)
        except Exception as error:
            raise _GivenUp("failed") from error
        some = exact.take(where, len(drawn[0]))
        if some > 0:
            ones = self.fast.pairs(mean, drawn[0][:some], None if drawn[1] is None else drawn[1][:some], outputs)
            self.sums.bad[0] += sum(int((~x.isfinite()).any(-1).sum()) for x in ones)
            exact.add(where, ones, (values[0][:some], values[1][:some]))
        return block_sums(values[0], values[1], lines(slopes, *drawn), centre, self.products)

    def _first_values(self, drawn: tuple[Tensor, Tensor | None], wide: Tensor | None) -> tuple[Tensor, ...]:
        """Outputs (p, E, d) at both inputs of the first pairs, and of wide ones in the same run, if the network can
        take these.
        """
        if wide is None:
            return self.fast.replayed("pairs", self.fast.pairs, self.mean, *drawn, self.outputs)
        pairs = len(drawn[0])
        try:
            first, second = self.fast.replayed(
                "pairs", self.fast.pairs, self.mean, torch.cat([drawn[0], wide]), None, self.outputs
            )
        except Exception:  # of inputs that the noise itself would hardly give
            self.wide_pairs = 0
            return self._first_values(drawn, None)
        return first[:pairs], second[:pairs], first[pairs:], second[pairs:]

    def _draw_wide(self) -> Tensor | None:
        """Deviations (p, E, n) at wider noise, if any are wanted, which leave the other samples as they are."""
        if self.wide_pairs == 0:
            return None
        generator = torch.Generator(self.noise.device).manual_seed(random_seed(self.seed, "wide", 0))
        return WIDENING * self.noise.covariance.draw((self.wide_pairs, len(self.mean)), generator)

    def _draw(self, where: Tensor | None, pairs: int, mirrored: bool) -> tuple[Tensor, Tensor | None]:
        """Deviations (p, A, n) from the means: of the first sample of a pair; of the second, if it is not mirrored."""
        covariance = self.noise.covariance
        shape = (pairs, len(self.mean))
        if where is not None:
            covariance, shape = covariance.entries(where), (pairs, len(where))
        first = covariance.draw(shape, self.generator)
        return first, None if mirrored else covariance.draw(shape, self.generator)

    def _refuse_infinite(self, found: Standing) -> None:
        """An error that says how many samples gave no numbers, and which outputs; or another try in float32."""
        if self.half is not None or self.low is not None:
            raise _GivenUp("overflowed")
        where = self.sums.bad[1:].nonzero().squeeze(1).tolist()
        named = ", ".join(map(str, where[:4])) + (", …" if len(where) > 4 else "")
        raise ValueError(
            f"output_moments: {found.infinite} of {2 * int(found.pairs.sum())} samples gave NaN or infinite outputs "
            f"(output {named}), so that there are no moments; use less noise, clamp the network's input, or choose "
            f"other outputs="
        )


def _sums_of_block(
    network: FastNetwork,
    products: bool,
    mean: Tensor,
    centre: Tensor,
    slopes: Tensor | None,
    outputs: Tensor | None,
    deviations: Tensor,
    others: Tensor | None,
) -> tuple[Tensor, ...]:
    """`block_sums` of pairs that a network is run on."""
    first, second = network.pairs(mean, deviations, others, outputs)
    return block_sums(first, second, lines(slopes, deviations, others), centre, products)


class _GivenUp(Exception):
    """Low precision gave something that is not a number, or the network failed in it; which, in a word."""


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

"""As many samples as a tolerance needs: mirrored pairs, with the network's expected slopes as control.

A first few pairs say how the outputs vary; from that follows how much expected slopes are worth, at how many points the
network is differentiated for them, and how many pairs are needed. More are drawn, in a few rounds, until the errors of
all inputs are within the tolerance or a limit is reached.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.gaussian import Gaussian
from netmoments.memory import directions_at_once
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision, matmul
from netmoments.progress import Progress
from netmoments.sampling.evaluation import random_seed
from netmoments.sampling.fast_network import fast_network
from netmoments.sampling.pair_sums import FOLDS, PairEstimate, PairSums

PILOT = 64
"""Pairs of the first round."""
GROWTH = 8
"""A round has at most so many times the pairs of all before: what few pairs say of a variance is not to be trusted."""
BLOCK = 512
"""Pairs of one input that are summed at a time on a CPU."""
BACKWARD = 3
"""What one output's gradient costs, in runs of the network."""
MOST_POINTS = 16
"""Points at which gradients are taken, at most."""
SLOPE_NUMBERS = 2**26
"""Slopes are kept for all inputs of a call if these are no more numbers than that."""


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

    @property
    def how(self) -> str:
        """In words."""
        if self.points == 0:
            return "independent samples, as the network has no derivative that would help"
        where = "at the mean" if self.points == 1 else f"from gradients at {self.points} points"
        return f"mirrored pairs of samples, controlled by expected slopes {where}"


def relative_errors(estimate: PairEstimate) -> Tensor:
    """The tolerance that an estimate meets, (E,): errors of means in standard deviations, errors of variances relative
    and by √2, the larger of their averages over the outputs.
    """
    variance = estimate.variance
    varies = variance > 0
    safe = torch.where(varies, variance, 1.0)
    mean = torch.where(varies, (estimate.mean_error / safe).sqrt(), 0.0).mean(-1)
    second = torch.where(varies, estimate.variance_error.sqrt() / safe, 0.0).mean(-1)
    return torch.maximum(mean, second / math.sqrt(2))


@torch.no_grad()
def sampled_to_tolerance(
    model: NetworkModel, noise: Gaussian, outputs: Tensor | None, goal: Goal, *, seed: int, products: bool
) -> Adaptive:
    """Moments of the outputs (all, or those with indices (E, k)) for noise with one batch dimension, E inputs."""
    with torch.inference_mode(False), full_precision():
        work = _Sampling(model, noise, outputs, seed)
        return work.until(goal, products)


@torch.no_grad()
def sampled_plainly(model: NetworkModel, noise: Gaussian, outputs: Tensor, samples: int, *, seed: int) -> Adaptive:
    """Means and variances from so many independent samples, without covariances: for any number of outputs."""
    with torch.inference_mode(False), full_precision():
        work = _Sampling(model, noise, outputs, seed)
        work.mirrored = False
        return work.until(Goal(1e-12, samples), products=False)


class _Sampling:
    """A network, and the noise that is put into it."""

    def __init__(self, model: NetworkModel, noise: Gaussian, outputs: Tensor | None, seed: int) -> None:
        self.model, self.outputs, self.seed = model, outputs, seed
        self.noise = Gaussian._trusted(noise.mean.detach(), noise.covariance.to(noise.dtype), noise.event_ndim)
        self.fast = fast_network(model)
        self.generator = torch.Generator(noise.device).manual_seed(seed)
        self.slopes: Tensor | None = None
        self.known: Tensor | None = None
        self.points = 0
        self.mirrored = self._may_differentiate()

    def until(self, goal: Goal, products: bool) -> Adaptive:
        start, stopped = time.perf_counter(), None
        entries = len(self.noise.mean)
        every = torch.arange(entries, device=self.noise.device)
        most = max(FOLDS, goal.samples // 2 // FOLDS * FOLDS)
        deviations = self._draw(every, min(PILOT, most))
        first, second = self._values(every, deviations)
        sums = PairSums(((first + second) / 2).mean(0).double(), products)
        self._find_slopes(first, second, goal, products)
        sums.add(every, first, second, self._lines(every, deviations))
        del deviations, first, second
        shown = 0
        with Progress("sampling", most) as progress:
            while True:
                estimate = sums.estimate(self.known)
                reached = relative_errors(estimate).cpu()
                share = (reached / goal.tolerance) ** 2
                done = sums.pairs
                progress.advance(int(done.min()) - shown)
                shown = int(done.min())
                missing = (
                    torch.where(share > 1, (share * 1.03).clamp(max=1 + GROWTH) * done, done).ceil().clamp(max=most)
                )
                missing = ((missing - done) / FOLDS).ceil().long() * FOLDS
                missing = torch.minimum(missing, most - done)
                active = (missing > 0).nonzero().squeeze(1)
                if len(active) == 0:
                    if bool((share > 1).any()):
                        stopped = f"the limit of {goal.samples:,} samples"
                    break
                if goal.seconds is not None and time.perf_counter() - start > goal.seconds:
                    stopped = f"the limit of {goal.seconds:g} seconds"
                    break
                wanted = missing[active]
                pairs = int(torch.maximum(wanted.min(), wanted.max() // (4 * FOLDS) * FOLDS))
                self._round(sums, active.to(self.noise.device), pairs, goal, start)
        runs = 2 * sums.pairs + self.points
        wins = sums.wins / sums.wins.sum(-1, keepdim=True)
        return Adaptive(estimate, runs, wins, reached, self.points, stopped)

    def _round(self, sums: PairSums, active: Tensor, pairs: int, goal: Goal, start: float) -> None:
        """So many more pairs for the active entries, a block at a time."""
        block = self._block(len(active))
        for done in range(0, pairs, block):
            if goal.seconds is not None and time.perf_counter() - start > goal.seconds:
                return
            deviations = self._draw(active, min(block, pairs - done))
            first, second = self._values(active, deviations)
            sums.add(active, first, second, self._lines(active, deviations))

    def _block(self, entries: int) -> int:
        """Pairs of each entry that go together: what fills the network's batch and is worth summing."""
        on_cpu = self.noise.device.type == "cpu"
        pairs = max(self.fast.batch // (2 * entries), BLOCK // entries if on_cpu else 0)
        return max(FOLDS, pairs // FOLDS * FOLDS)

    def _draw(self, active: Tensor, pairs: int) -> Tensor:
        """Deviations (p, A, n) from the means."""
        covariance = self.noise.covariance.entries(active)
        return covariance.draw((pairs, len(active)), self.generator)

    def _values(self, active: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (p, A, d) at both samples of each pair."""
        mean = self.noise.flat_mean[active]
        other = -deviations if self.mirrored else self._draw(active, len(deviations))
        inputs = torch.stack([mean + deviations, mean + other]).reshape(-1, *self.noise.event_shape)
        values = self.fast.values(inputs).reshape(2, len(deviations), len(active), -1)
        if self.outputs is not None:
            chosen = self.outputs[active]
            values = values.gather(3, chosen.expand(2, len(deviations), -1, -1))
        self._require_finite(values, active)
        return values[0], values[1]

    def _require_finite(self, values: Tensor, active: Tensor) -> None:
        finite = torch.isfinite(values)
        if bool(finite.all()):
            return
        bad = ~finite
        samples = int(bad.any(-1).sum())
        where = bad.any(0).any(0).any(0).nonzero().squeeze(1).tolist()
        named = ", ".join(map(str, where[:4])) + (", …" if len(where) > 4 else "")
        raise ValueError(
            f"output_moments: {samples} of {bad.shape[0] * bad.shape[1] * bad.shape[2]} samples gave NaN or infinite "
            f"outputs (output {named}); moments do not exist there: use less noise, clamp the network's input, or "
            f"choose other outputs="
        )

    def _lines(self, active: Tensor, deviations: Tensor) -> Tensor | None:
        """The control ℓ = S δ, (p, A, d)."""
        if self.slopes is None:
            return None
        return matmul(deviations.movedim(0, 1), self.slopes[active].mT).movedim(0, 1)

    def _may_differentiate(self) -> bool:
        differentiable = self.model.differentiable
        return differentiable and not any(x.is_inference() for x in self.model.network.parameters())

    def _find_slopes(self, first: Tensor, second: Tensor, goal: Goal, products: bool) -> None:
        """Expected slopes S (E, d, n), from gradients at points of their own, if they are worth their cost.

        With the share v of the outputs' variance that is even in the noise, slopes from K gradients lose about 2v/K of
        the variance they explain, which costs 8v/K more pairs of 1/tolerance² (see `pair_sums`), and BACKWARD·d·K runs
        of the network: the best K follows.
        """
        if not self.mirrored:
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
            slopes = self._expected_slopes(points if points == 1 else points // 2 * 2)
        except RuntimeError:
            return
        if not bool(torch.isfinite(slopes).all()):
            return
        self.slopes, self.points = slopes, points
        push = self.noise.covariance.to(torch.float64)
        known = push.push(slopes.double()) if products else push.push_diagonal(slopes.double())
        self.known = known.expand(len(slopes), *known.shape[1:])

    def _expected_slopes(self, points: int) -> Tensor:
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
        together = max(1, directions_at_once(noise.device, self.model.largest, noise.dtype.itemsize, None) // points)
        parts = []
        for some in torch.arange(entries, device=noise.device).split(together):
            parts.append(self._gradients(inputs[:, some], some).mean(1))
        return torch.cat(parts)

    def _gradients(self, inputs: Tensor, entries: Tensor) -> Tensor:
        """Gradients (A, K, d, n) of the outputs at K points (K, A, n) of each of A entries."""
        points = len(inputs)
        with torch.enable_grad():
            x = inputs.reshape(-1, *self.noise.event_shape).detach().requires_grad_()
            values = self.fast(x)
            if self.outputs is not None:
                values = values.gather(1, self.outputs[entries].repeat(points, 1))
            found = []
            for output in range(values.shape[1]):
                more = output + 1 < values.shape[1]
                (slope,) = torch.autograd.grad(values[:, output].sum(), x, retain_graph=more)
                found.append(slope.reshape(points, len(entries), -1))
        return torch.stack(found, 2).movedim(0, 1)

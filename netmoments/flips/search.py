"""Surrogates found by a few hundred gradients: from a start, rounds of runs where the surrogates so far are unsure.

There are two starts, which share nothing but the network: from the noise itself, whose expected gradients point to
where the expected margin becomes 0, and from samples that are pulled across the boundary one by one, each by its own
gradient. Agreement of what the two find is part of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.flips.guide import FEWER, Guide, guide
from netmoments.flips.margins import NoisyMargins
from netmoments.flips.surrogate import Evidence, Quadratic, fitted, ways

START = 32
"""Gradients of a start."""
ROUND = 48
"""Gradients of a round, at least."""
GROWTH = 0.35
"""A round has so many gradients of those before."""
CANDIDATES = 4
"""Rivals that are looked at from a start, at most."""
SEEDS = 12
"""Gradients of each of them, at least."""
FEWEST = 8
"""Gradients of a rival's margin that make a surrogate."""
WITHIN = 3.0
"""How many more standard deviations than the nearest a rival may be away to be looked at."""
PULLS = 3
"""Newton steps of a sample across the boundary."""
LONGEST_PULL = 12.0
"""Standard deviations of the noise."""
MOST_DIRECTIONS = 192
"""Of a surrogate."""
GRADIENTS_EACH = 4
"""Gradients for each direction of a surrogate."""
ATTENTION = 0.12
"""Of a round: what each of several surrogates gets for itself."""
CURIOUS = 2
"""Rounds in which it does, however little it matters."""
RELEVANT = 1e-3
"""Of the probability: what makes it matter afterwards."""


@dataclass(eq=False)
class Search:
    """One search: what was run, and the surrogates and guide that follow from it."""

    margins: NoisyMargins
    generator: torch.Generator
    evidence: Evidence
    start: Evidence | None = None
    """Runs of the start where they are not samples of the noise: used until there are others."""
    guide: Guide | None = None
    rounds: int = 0
    plain: Tensor | None = None
    """The strongest margins at the samples of the noise that it started with, (N,)."""

    @classmethod
    async def from_noise(cls, margins: NoisyMargins, generator: torch.Generator) -> Search:
        """Started with samples of the noise: gradients of the strongest margins, and some of each likely rival's."""
        white = margins.normal(START)
        evidence = await _evidence(margins, white, torch.full((START,), -1, device=white.device))
        found = cls(margins, generator, evidence, plain=evidence.margins.amin(1))
        for rival in likely_rivals(evidence.margins):
            await found.seed(rival)
        return found

    @classmethod
    async def from_pulled(cls, margins: NoisyMargins, generator: torch.Generator) -> Search:
        """Started with samples that are pulled across the boundary, each by Newton steps along its own gradient."""
        white = margins.normal(START)
        parts = []
        for _ in range(PULLS):
            part = await _evidence(margins, white, torch.full((len(white),), -1, device=white.device))
            parts.append(part)
            margin = part.margins.gather(1, part.rivals.unsqueeze(1)).to(white.dtype)
            square = part.gradients.square().sum(1, keepdim=True)
            step = torch.where(square > 0, margin * part.gradients / square.clamp(min=1e-30), 0.0)
            length = step.norm(dim=1, keepdim=True)
            white = white - step * (LONGEST_PULL / length.clamp(min=LONGEST_PULL))
        pulled = parts[0].joined(parts[1]).joined(parts[2])
        found = cls(margins, generator, parts[0], start=pulled)
        for rival in likely_rivals(parts[0].margins):
            await found.seed(rival)
        return found

    @classmethod
    def joined(cls, first: Search, second: Search) -> Search:
        """One that knows what both have found."""
        return cls(first.margins, first.generator, first.evidence.joined(second.evidence), rounds=CURIOUS)

    async def seed(self, rival: int) -> None:
        """Gradients of a rival's margin at some samples of the noise, where there are too few."""
        missing = SEEDS - int((self.evidence.rivals == rival).sum())
        if missing <= 0:
            return
        white = self.margins.normal(missing)
        which = torch.full((missing,), rival, device=white.device)
        self.evidence = self.evidence.joined(await _evidence(self.margins, white, which))

    @property
    def gradients(self) -> int:
        return len(self.evidence) + (0 if self.start is None else len(self.start))

    @property
    def next_round(self) -> int:
        """Gradients of the next round."""
        return max(ROUND, int(GROWTH * self.gradients))

    def surrogates(self) -> tuple[Quadratic, ...]:
        """A surrogate for every rival with enough gradients, or two where there are two ways to it."""
        evidence = self.evidence
        if self.start is not None and self.rounds < 2:
            evidence = evidence.joined(self.start)
        found = []
        for rival, count in enumerate(evidence.rivals.bincount(minlength=1).tolist()):
            if count < FEWEST:
                continue
            for part in ways(evidence.of_rival(rival), FEWEST):
                surrogate = fitted(part, rival, max(2, min(MOST_DIRECTIONS, len(part) // GRADIENTS_EACH)))
                if surrogate.size > 0:
                    found.append(surrogate)
        return tuple(found)

    def refit(self, points: int = FEWER) -> None:
        """A new guide from all evidence; none where nothing moves the margins."""
        self.margins.clock.require_time()
        surrogates = self.surrogates()
        self.guide = guide(surrogates, self.generator, points) if surrogates else None

    async def advance(self) -> None:
        """A round, and what follows from it."""
        if self.guide is None:
            self.refit()
        if self.guide is not None:
            await self.round()
            self.refit()

    async def round(self) -> None:
        """Gradients at samples of the guide, and of each surrogate's own."""
        assert self.guide is not None
        white, which = self._samples(self.next_round)
        self.evidence = self.evidence.joined(await _evidence(self.margins, white, which))
        self.rounds += 1

    def _samples(self, count: int) -> tuple[Tensor, Tensor]:
        """ε (count, n), and whose margin is differentiated at each: of some the surrogate's, else the strongest."""
        assert self.guide is not None
        pairs = zip(self.guide.surrogates, self.guide.shares, strict=True)
        apart = [one for one, share in pairs if self.rounds < CURIOUS or RELEVANT < share < 1 - ATTENTION]
        apart = apart if len(self.guide.surrogates) > 1 else []
        each = max(2, min(int(ATTENTION * count), count // (2 * max(1, len(apart)))))
        drawn = [self.guide.draw(self.margins.normal(max(2, count - each * len(apart))), self.generator)]
        which = [torch.full((len(drawn[0]),), -1, device=drawn[0].device)]
        for surrogate in apart:
            own = guide((surrogate,), self.generator, FEWER).draw(self.margins.normal(each), self.generator)
            whose = torch.full((each,), -1, device=own.device)
            whose[::2] = surrogate.rival
            drawn.append(own)
            which.append(whose)
        return torch.cat(drawn), torch.cat(which)


async def _evidence(margins: NoisyMargins, white: Tensor, which: Tensor) -> Evidence:
    found, gradients = await margins.with_gradients(white, which)
    return Evidence(white, found, gradients, torch.where(which < 0, found.argmin(1), which))


def likely_rivals(margins: Tensor) -> list[int]:
    """Rivals whose margins (N, d) are fewest standard deviations above 0."""
    finite = torch.isfinite(margins).all(0)
    mean, spread = margins.mean(0), margins.std(0)
    away = torch.where(finite, mean / spread.clamp(min=1e-300), torch.inf)
    nearest = away.argsort()[:CANDIDATES].tolist()
    least = float(away[nearest[0]])
    return [rival for rival in nearest if float(away[rival]) < max(least + WITHIN, 1.5 * least)]

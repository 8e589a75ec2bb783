"""What noise does to a network's answers on a set of images: what was asked, and what came out.

Every image is sampled until its flip probability is known to a point or so; how rare flips are of the images that are
nearest to one is then found, down to 1e-12. Everything has an interval, and says what it took.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.data.images import LabelledImages
from netmoments.flips.flip_probability import FlipGoal, entries_found
from netmoments.flips.margins import Clock
from netmoments.flips.result import shares_interval
from netmoments.flips.search import nearest_flip
from netmoments.flips.survey import Survey, SurveyGoal, expected_share_error, surveyed
from netmoments.gaussian import Gaussian, random_seed
from netmoments.moments.output_moments import output_moments
from netmoments.network.model import NetworkModel, network_of
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.report.arguments import RELATIVE_LEVELS, StudyConfig, with_classes_of
from netmoments.report.attack_study import AttackStudy, NotAttacked, few_attacks
from netmoments.report.pictures import drawable, drawn_noise
from netmoments.report.words import seconds_in_words
from netmoments.sampling.fast_network import fast_network

CALLER = "report"
RELATIVE_ERROR = 0.1
"""Of the flip probabilities of the images nearest to flipping."""
RARE_RUNS = 50_000
"""Runs of the network for one of them, at most."""
FIRST_ROUND = (16, 192)
"""Samples of every image, at least where they take long, and where they do not."""
CURVE_SAMPLES = (16, 64, 2000)
"""Samples of every image at each other level of the curve: at least where they take long, at least, and at most."""
CURVE_TOTAL = 20_000
"""Of all images together, where there are few."""
ALL_SCORES = 20
"""Up to so many classes, the scores of all are shown; of more, only the largest."""
TIME_IS_OVER, INTERRUPTED = "the time allowed", "an interruption"
"""What may end the work early."""
COPIES = 5
"""Noisy copies that are shown of an image."""
COPIES_SHARE = 0.1
"""Of the time, that the network may be asked about them."""
NEAREST = 18
"""Images, the most fragile first, of which the nearest flip is looked for; and those that have noisy copies."""
NEAREST_RUNS, NEAREST_SHARE = 800, 0.1
"""Of the network, that one is reckoned to take; of the time, that all may take."""


@dataclass(frozen=True)
class CurvePoint:
    """At one noise level: the share of answers that are right (without labels: the same), with a 95 % band."""

    sigma: float
    share: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Example:
    """One image with noisy copies."""

    image: int
    noisy: Tensor
    noisy_classes: Tensor


@dataclass(frozen=True, eq=False)
class FlippedImage:
    """One image with the smallest change that was found to change its answer."""

    image: int
    change: Tensor
    """What is added to the image, of its shape."""
    distance: float
    """Its length √(δᵀΣ⁻¹δ) in standard deviations of the chosen noise: |δ|/σ where that is the same on every pixel."""
    becomes: int
    """The class that wins then."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Of each image the k scores that are largest without noise: (N, k) each, with standard errors."""

    outputs: Tensor
    mean: Tensor
    deviation: Tensor
    mean_error: Tensor
    deviation_error: Tensor
    method: str

    def place(self, number: int, label: int) -> int | None:
        """Where a class is among those of an image."""
        places = (self.outputs[number] == label).nonzero().flatten().tolist()
        return places[0] if places else None


@dataclass(frozen=True, eq=False)
class Level:
    """What plain samples say of N images at one noise level: (N,) each, of the k scores that are shown (N, k)."""

    sigma: float
    samples: Tensor
    """Without noise one, which says all there is."""
    flips: Tensor
    """How many of them another class won than the answer without noise."""
    right: Tensor
    """How many the label won; without labels, the answer without noise."""
    rivals: Tensor
    lead: Tensor
    shares: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, sigma: float, survey: Survey, clean: Tensor, followed: Tensor, wanted: Tensor) -> Level:
        """`clean` are the scores without noise; `wanted` (N,) are the classes that are right."""
        predicted = clean.argmax(1, keepdim=True)
        flips = survey.samples - survey.wins.gather(1, predicted).squeeze(1)
        best = clean.scatter(1, predicted, -torch.inf).argmax(1)
        rivals = torch.where(flips > 0, survey.wins.scatter(1, predicted, -1).argmax(1), best)
        right = survey.wins.gather(1, wanted.unsqueeze(1)).squeeze(1)
        shares = survey.wins.gather(1, followed) / survey.samples.double().unsqueeze(1)
        rows = (survey.samples, flips, right, rivals, survey.lead, shares, survey.mean, survey.deviation)
        return cls(sigma, *(row.cpu() for row in rows))

    @classmethod
    def without_noise(cls, clean: Tensor, followed: Tensor, wanted: Tensor) -> Level:
        ones = torch.ones(len(clean), dtype=torch.int64, device=clean.device)
        wins = functional.one_hot(clean.argmax(1), clean.shape[1])
        mean = clean.gather(1, followed).double()
        nothing, ahead = torch.zeros_like(mean), torch.full_like(mean[:, 0], torch.inf)
        return cls.of(0.0, Survey(ones, wins, mean, nothing, nothing, nothing, ahead), clean, followed, wanted)

    @cached_property
    def flip(self) -> Tensor:
        """How often each image flips, (N,)."""
        return self.flips / self.samples.double()

    @cached_property
    def interval(self) -> Tensor:
        """Of 95 %, (N, 2); without noise nothing is left to chance."""
        known = shares_interval(self.flips, self.samples)
        return known if self.sigma > 0 else torch.zeros_like(known)

    def point(self, which: Tensor | slice = slice(None)) -> CurvePoint:
        """The mean over some of the images, with a band of two standard errors; without noise there is no error."""
        count, samples = self.right[which], self.samples[which]
        share = float((count / samples.double()).mean())
        error = 2 * expected_share_error(count, samples) if self.sigma > 0 else 0.0
        return CurvePoint(self.sigma, share, max(0.0, share - error), min(1.0, share + error))


@dataclass(frozen=True, eq=False)
class Study:
    """Everything the report shows. N images, k scores shown, L noise levels."""

    config: StudyConfig
    images: LabelledImages
    classes: tuple[str, ...]
    predicted: Tensor
    """The answers without noise, (N,)."""
    count: int
    """Of the network's classes."""
    scores: Scores
    shares: Tensor
    """How often each of the classes whose scores are shown won among the samples at the chosen noise, (N, k)."""
    samples: Tensor
    """How many these were, (N,)."""
    lead: Tensor
    """How many standard deviations the answer's score is ahead of the best other, (N,)."""
    flip: Tensor
    """How often another class than the network's answer without noise wins, (N,)."""
    interval: Tensor
    """Of 95 %, (N, 2)."""
    runs: Tensor
    """Of the network, that this took, (N,)."""
    route: tuple[str, ...]
    """How each was found: "frequencies", "importance", "splitting", …"""
    rivals: Tensor
    """The class that wins most often instead; where none was seen, the one with the best score, (N,)."""
    curve: tuple[CurvePoint, ...]
    """Beginning without noise."""
    levels: tuple[Level, ...]
    """The same image by image."""
    copies: Tensor | None = None
    """The answers (L, N, c) to the noisy copies that `pictures.drawn_noise` gives; None where none were asked for."""
    examples: tuple[Example, ...] = ()
    nearest: tuple[FlippedImage, ...] = ()
    """Of the images shown first: as far as flips were found, and time allowed."""
    attacks: AttackStudy | NotAttacked | None = None
    """Noise made to fool the network, or why there is none; None where none was asked for."""
    stopped: str = ""
    """What ended the work early, if something did."""
    seconds: float = 0.0

    @property
    def order(self) -> Tensor:
        """The images, the most fragile first, (N,): by flip probability; of those with a bound alone, by their lead."""
        key = torch.where(self.bounded, 1 / (1 + self.lead.clamp(min=0)) - 2, self.flip)
        return key.argsort(descending=True, stable=True)

    @property
    def clean_accuracy(self) -> float | None:
        return float((self.predicted == self.kinds).double().mean()) if self.labelled else None

    @property
    def half_width(self) -> Tensor:
        """Of the intervals, (N,)."""
        return (self.interval[:, 1] - self.interval[:, 0]) / 2

    @property
    def bounded(self) -> Tensor:
        """Where nothing finer than an upper bound is known, (N,)."""
        return self.flip == 0

    @property
    def labelled(self) -> bool:
        return self.images.labels is not None

    @property
    def kinds(self) -> Tensor:
        """The class that each image belongs to, (N,): its label, without labels the answer without noise."""
        return self.predicted if self.images.labels is None else self.images.labels

    def class_name(self, number: int) -> str:
        return self.classes[number] if self.classes else str(number)

    def label(self, number: int) -> int | None:
        """Of an image, where labels are known."""
        return None if self.images.labels is None else int(self.images.labels[number])

    def nearest_flip(self, number: int) -> FlippedImage | None:
        """Of an image, where one was looked for and found."""
        return next((each for each in self.nearest if each.image == number), None)

    def at(self, place: int) -> Study:
        """What samples say at one of the levels, as if that had been asked about."""
        level = self.levels[place]
        if math.isclose(level.sigma, self.config.sigma):
            return self
        return dataclasses.replace(
            self, scores=dataclasses.replace(self.scores, mean=level.mean, deviation=level.deviation),
            shares=level.shares, samples=level.samples, lead=level.lead, flip=level.flip, interval=level.interval,
            runs=level.samples, route=("frequencies",) * len(level.flips), rivals=level.rivals,
        )  # fmt: skip


def study(
    network: Any,
    images: LabelledImages,
    config: StudyConfig,
    classes: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Study:
    """Compute a `Study`; `say` is told what it will take. Ctrl-C after the first samples of all keeps what is known."""
    start = time.perf_counter()
    network = network_of(network.to(config.device) if isinstance(network, nn.Module) else network, CALLER)
    pixels = images.images.to(config.device)
    model = classifier(network, pixels, config)
    images, names = with_classes_of(images, classes, model.outputs, CALLER)
    plan = TimePlan.of(model, len(images), config)
    say(plan.in_words(len(images)))
    found = model.answer(lambda: _found(model, pixels, images, names, config, plan))
    attacks = attacks_on(network, found)
    return dataclasses.replace(found, attacks=attacks, seconds=time.perf_counter() - start)


def survey_of(network: nn.Module, images: LabelledImages, config: StudyConfig, plan: TimePlan) -> Study:
    """The flips of all images by samples alone, and the curve: a part of a study of many."""
    network, pixels = network.to(config.device), images.images.to(config.device)
    model = classifier(network_of(network, CALLER), pixels, config)
    alone = dataclasses.replace(config, rare=0, examples=0, attacks=0)
    return model.answer(lambda: _found(model, pixels, images, (), alone, plan))


def classifier(network: nn.Module, pixels: Tensor, config: StudyConfig) -> NetworkModel:
    """The model of a network that gives each image two scores or more, and has the ReLU that attacks are to keep."""
    model = NetworkModel.of_any(network, pixels, CALLER)
    if len(model.parts) != 1 or len(model.parts[0].shape) != 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in model.parts)
        raise ValueError(f"{CALLER}: the network must give each image one row of scores, got {shapes}")
    if model.outputs < 2:
        raise ValueError(
            f"{CALLER}: a class wins against others, and the network has only {model.outputs} score; make it two, "
            f"[0, score] for a yes-or-no network"
        )
    if config.attacks and model.relus:
        model.relu(config.layer)
    return model


@dataclass(frozen=True)
class TimePlan:
    """How the time is spent: on a first look at all images, on the curve, on what is rare."""

    cost: float
    """Seconds of a run of the network, in a batch."""
    first: int
    """Samples of each image in the first round."""
    curve: int
    """At each other level of the curve."""
    survey_seconds: float
    seconds: float

    @classmethod
    def of(cls, model: NetworkModel, images: int, config: StudyConfig) -> TimePlan:
        with torch.no_grad():
            cost = fast_network(model).cost
        seconds = config.allowance(images)
        per_image = seconds / (cost * images)
        first = int(min(max(0.25 * per_image, FIRST_ROUND[0]), FIRST_ROUND[1], config.samples))
        least, enough, most = CURVE_SAMPLES
        wanted = min(max(CURVE_TOTAL / images, enough), most)
        curve = int(min(max(0.2 * per_image / (len(RELATIVE_LEVELS) - 1), least), wanted, max(config.samples, 2)))
        return cls(cost, first, curve, 0.5 * seconds, seconds)

    @classmethod
    def without_limit(cls, images: int) -> TimePlan:
        """The same for any machine."""
        _, enough, most = CURVE_SAMPLES
        return cls(0.0, FIRST_ROUND[1], int(min(max(CURVE_TOTAL / images, enough), most)), math.inf, math.inf)

    def in_words(self, images: int) -> str:
        """What it will take, before it begins."""
        least = images * (self.first + (len(RELATIVE_LEVELS) - 1) * self.curve)
        return (
            f"{images:,} images, {1e3 * self.cost:.2g} ms a run: at least {least:,} runs of the network "
            f"({seconds_in_words(least * self.cost)}), at most about {seconds_in_words(self.seconds)} (--seconds)"
        )


def _found(
    model: NetworkModel,
    pixels: Tensor,
    images: LabelledImages,
    names: tuple[str, ...],
    config: StudyConfig,
    plan: TimePlan,
) -> Study:
    clock = Clock(plan.seconds)
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        clean = torch.cat([model.network(part.clone()) for part in pixels.split(256)])
    if not bool(torch.isfinite(clean).all()):
        bad = int((~torch.isfinite(clean)).any(1).nonzero()[0])
        raise ValueError(f"{CALLER}: the network's scores for {images.names[bad]} are not finite, even without noise")
    predicted = clean.argmax(1)
    labels = None if images.labels is None else images.labels.to(pixels.device)
    followed = followed_scores(clean, labels, config.scores)
    goal = SurveyGoal(config.tolerance, plan.first, config.samples)
    noise = config.noise(pixels)
    limit, seed = Clock(plan.survey_seconds), random_seed(config.seed, "survey", 0)
    survey = surveyed(
        model, noise, predicted, followed, goal, seed=seed, clock=limit, description="flips of all images"
    )
    found = _of_survey(config, images, names, clean, followed, survey)
    short = (found.half_width > config.tolerance) & (found.samples < config.samples)
    if bool(short.any()):
        found = dataclasses.replace(found, stopped=TIME_IS_OVER)
    try:
        levels = _levels(model, pixels, clean, followed, found, plan.curve)
        found = dataclasses.replace(found, levels=levels, curve=_curve(levels))
        found = _rare(model, noise, found, clock)
        if found.stopped == INTERRUPTED:
            return found
        found = dataclasses.replace(
            found, scores=_scores(model, noise, found), examples=examples_of(model, noise, found),
            copies=_answers_to_copies(model, pixels, found, plan),
        )  # fmt: skip
        if numbers := nearest_candidates(found):
            numbers = numbers[: int(NEAREST_SHARE * plan.seconds / (NEAREST_RUNS * plan.cost))]
            nearest = nearest_of(model, noise, numbers, predicted[numbers], config.seed)
            found = dataclasses.replace(found, nearest=nearest)
    except KeyboardInterrupt:
        found = dataclasses.replace(found, stopped=INTERRUPTED)
    return found


def followed_scores(clean: Tensor, labels: Tensor | None, largest: int) -> Tensor:
    """The scores that are shown, (N, k): all of a few classes, else the largest ones and the right one."""
    count = clean.shape[1]
    if count <= max(ALL_SCORES, largest):
        return torch.arange(count, device=clean.device).expand(len(clean), -1)
    rows = clean.topk(largest, 1).indices
    if labels is not None:
        missing = ~(rows == labels.unsqueeze(1)).any(1)
        rows[missing, -1] = labels[missing]
    return rows


def _of_survey(
    config: StudyConfig,
    images: LabelledImages,
    names: tuple[str, ...],
    clean: Tensor,
    followed: Tensor,
    survey: Survey,
) -> Study:
    """What samples alone say."""
    predicted = clean.argmax(1)
    wanted = predicted if images.labels is None else images.labels.to(clean.device)
    errors = survey.mean_error.cpu(), survey.deviation_error.cpu()
    scores = Scores(followed.cpu(), survey.mean.cpu(), survey.deviation.cpu(), *errors, "sampling")
    own = Level.of(config.sigma, survey, clean, followed, wanted)
    levels = (Level.without_noise(clean, followed, wanted), own)
    return Study(
        config, images, names, predicted.cpu(), clean.shape[1], scores, own.shares, own.samples, own.lead,
        own.flip, own.interval, own.samples, ("frequencies",) * len(clean), own.rivals, _curve(levels), levels,
    )  # fmt: skip


def _curve(levels: Sequence[Level]) -> tuple[CurvePoint, ...]:
    return tuple(level.point() for level in levels)


def _levels(
    model: NetworkModel, pixels: Tensor, clean: Tensor, followed: Tensor, found: Study, count: int
) -> tuple[Level, ...]:
    """So many samples of each image at every level. The noise is the same, scaled: what is left of chance is common."""
    config, predicted, wanted = found.config, clean.argmax(1), found.kinds.to(clean.device)
    start, chosen = found.levels
    levels, goal = [start], SurveyGoal(1.0, count, count)
    with progress_bar("accuracy over noise", len(RELATIVE_LEVELS)) as show:
        for level, sigma in zip(RELATIVE_LEVELS, config.levels, strict=True):
            show(len(levels) - 1)
            if math.isclose(level, 1.0):
                levels.append(chosen)
            else:
                noise, seed = config.noise(pixels, level), random_seed(config.seed, "curve", 0)
                survey = surveyed(model, noise, predicted, followed, goal, seed=seed)
                levels.append(Level.of(sigma, survey, clean, followed, wanted))
    return tuple(levels)


def _rare(model: NetworkModel, noise: Gaussian, found: Study, clock: Clock) -> Study:
    """The flip probabilities of the images nearest to flipping, to 10 % of themselves, as far as the time goes."""
    numbers, left, refined = rare_candidates(found), seconds_left(clock), list[Refined]()
    if not numbers:
        return found
    labels = found.predicted[numbers].tolist()
    try:
        for one in refined_together(model, noise, numbers, labels, found.config, left):
            refined.append(one)
        stopped = TIME_IS_OVER if clock.over else found.stopped
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    return dataclasses.replace(with_refined(found, refined), stopped=stopped)


def seconds_left(clock: Clock) -> float | None:
    """Until the time is over, or a moment if it is; None where there is no end."""
    if clock.seconds is None or math.isinf(clock.seconds):
        return None
    return max(1e-9, clock.seconds - (time.perf_counter() - clock.start))


def rare_candidates(found: Study) -> list[int]:
    """The images nearest to flipping, but those whose flips were seen so often that 10 % are reached already."""
    nearest = found.order if found.config.rare is None else found.order[: found.config.rare]
    seen = found.flip * found.samples
    return [number for number in nearest.tolist() if float(seen[number]) < RELATIVE_ERROR**-2]


@dataclass(frozen=True)
class Refined:
    """What importance sampling or splitting found for one image."""

    number: int
    flip: float
    low: float
    high: float
    runs: int
    route: str
    rival: int
    """−1 where none was seen."""


def refined_together(
    model: NetworkModel, noise: Gaussian, numbers: Sequence[int], labels: Sequence[int], config: StudyConfig,
    seconds: float | None = None,
) -> Iterator[Refined]:  # fmt: skip
    """Of the images with these numbers, as they come; `noise` is that of all images."""
    goal = FlipGoal.read(CALLER, RELATIVE_ERROR, None, RARE_RUNS, seconds, config.seed)
    own = noise.entries(torch.tensor(list(numbers), device=noise.device))
    for place, one, runs in entries_found(model, own, labels, goal, "rare flips"):
        yield Refined(numbers[place], one.probability, *one.interval, runs, one.route, one.rival)


def with_refined(found: Study, refined: Sequence[Refined]) -> Study:
    """A study with these in place of what samples said, where they say more."""
    flip, interval, runs = found.flip.clone(), found.interval.clone(), found.runs.clone()
    route, rivals = list(found.route), found.rivals.clone()
    for one in refined:
        runs[one.number] += one.runs
        if one.flip > 0 or one.high < float(interval[one.number, 1]):
            flip[one.number], route[one.number] = one.flip, one.route
            interval[one.number] = torch.tensor([one.low, one.high], dtype=interval.dtype)
        if one.rival >= 0:
            rivals[one.number] = one.rival
    return dataclasses.replace(found, flip=flip, interval=interval, runs=runs, route=tuple(route), rivals=rivals)


def _scores(model: NetworkModel, noise: Gaussian, found: Study) -> Scores:
    """Those that were sampled, or by a formula."""
    if found.config.method == "auto":
        return found.scores
    outputs = found.scores.outputs
    moments = output_moments(model, noise, found.config.method, outputs).to("cpu")
    assert moments.error is not None
    deviation = moments.variance.sqrt()
    return Scores(
        outputs, moments.mean, deviation, moments.error.mean,
        moments.error.variance / (2 * deviation).clamp(min=1e-30), moments.method,
    )  # fmt: skip


def examples_of(model: NetworkModel, noise: Gaussian, found: Study) -> tuple[Example, ...]:
    """Noisy copies of the most fragile images, and of others evenly down the ranking."""
    made = []
    for number in example_images(found):
        generator = torch.Generator(noise.device).manual_seed(random_seed(found.config.seed, "copies", number))
        one = noise.entries(torch.tensor([number], device=noise.device))
        noisy = one.sample(COPIES, generator=generator)[:, 0]
        with torch.inference_mode(False), torch.no_grad(), full_precision():
            classes = model.network(noisy.clone()).argmax(1)
        made.append(Example(number, noisy.cpu(), classes.cpu()))
    return tuple(made)


def _answers_to_copies(model: NetworkModel, pixels: Tensor, found: Study, plan: TimePlan) -> Tensor | None:
    """What the network says to the noisy copies that a page draws itself, if it can and there is time for it."""
    config, levels = found.config, [level.sigma for level in found.levels]
    seconds = plan.cost * len(levels) * len(pixels) * COPIES
    wanted = config.examples and config.covariance is None and drawable(pixels[0])
    if not wanted or seconds > COPIES_SHARE * plan.seconds:
        return None
    answers = torch.empty(len(levels), len(pixels), COPIES, dtype=torch.int64)
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        sigmas = torch.tensor(levels, dtype=pixels.dtype, device=pixels.device).reshape(-1, *(1 for _ in pixels.shape))
        for number, image in enumerate(pixels):
            noisy = image + sigmas * drawn_noise(number, COPIES, image.shape).to(image)
            answers[:, number] = model.network(noisy.flatten(0, 1)).argmax(1).reshape(-1, COPIES).cpu()
    return answers


def example_images(found: Study) -> list[int]:
    """Half of them the most fragile, the others evenly down the ranking."""
    ranking = found.order.tolist()
    count = min(found.config.examples, len(ranking))
    fragile = (count + 1) // 2
    rest = ranking[fragile:]
    spread = [rest[(2 * i + 1) * len(rest) // (2 * (count - fragile))] for i in range(count - fragile)]
    return ranking[:fragile] + spread


def nearest_candidates(found: Study) -> list[int]:
    """The images whose nearest flip is looked for: those with noisy copies, and the most fragile ones."""
    if not found.config.examples:
        return []
    return list(dict.fromkeys([*example_images(found), *found.order[:NEAREST].tolist()]))


def nearest_of(
    model: NetworkModel, noise: Gaussian, numbers: Sequence[int], labels: Tensor, seed: int
) -> tuple[FlippedImage, ...]:
    """The nearest flips of images with these numbers and answers, but those of which none was found."""
    if not numbers:
        return ()
    own = noise.entries(torch.tensor(list(numbers), device=noise.device))
    found = nearest_flip(model, own, labels.to(noise.device), seed=seed)
    rows = zip(numbers, found.noise.cpu(), found.distance.tolist(), found.rival.tolist(), strict=True)
    return tuple(FlippedImage(*row) for row in rows if math.isfinite(row[2]))


def attacks_on(network: nn.Module, found: Study) -> AttackStudy | NotAttacked | None:
    """Noise made to fool the network, on a few of the images that it gets right; None where none was asked for."""
    config = found.config
    if not config.attacks:
        return None
    if found.stopped:
        return NotAttacked(f"No noise was made: {found.stopped} ended the work before.")
    attack = SparseSmooth(layer=config.layer, seed=config.seed)
    return few_attacks(network, found.images, found.classes, found.predicted, attack, config.attacks, config.device)

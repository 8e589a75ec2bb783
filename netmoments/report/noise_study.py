"""The noise study behind `netmoments report`: what noise does to a network's answers on a set of images.

`study` computes a `Study`. Every image is sampled until its flip probability is known to about a percentage point, and
at other noise levels for the curve. For the images nearest to flipping, probabilities down to 1e-12 are then found by
importance sampling or splitting. Every probability comes with an interval and with the number of runs that it took.
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
from netmoments.checks import random_seed
from netmoments.data.images import LabelledImages
from netmoments.flips.flip_probability import FlipGoal, entries_found
from netmoments.flips.noisy_network import Clock
from netmoments.flips.result import shares_interval
from netmoments.flips.search import nearest_flip
from netmoments.flips.survey import Survey, SurveyGoal, expected_share_error, surveyed
from netmoments.gaussian import Gaussian
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
"""The flip probabilities of the images nearest to flipping are found to this share of themselves."""
RARE_RUNS = 50_000
"""At most so many runs of the network are made for one of them."""
FIRST_ROUND = (16, 192)
"""Samples of every image in the first round: at least so many where they take long, and so many where they do not."""
CURVE_SAMPLES = (16, 64, 2000)
"""Samples of every image at each other level: the least where they take long, the least elsewhere, and the most."""
CURVE_TOTAL = 20_000
"""Where there are few images, they get so many samples together at each of these levels."""
ALL_SCORES = 20
"""Of up to so many classes all scores are shown; of more, only the largest."""
TIME_IS_OVER, INTERRUPTED = "the time allowed", "an interruption"
"""What may end the work early."""
COPIES = 5
"""Noisy copies that are shown of an image."""
COPIES_SHARE = 0.1
"""Asking the network about these copies may take this share of the time."""
NEAREST = 18
"""The nearest flip is looked for on so many of the most fragile images, and on those with noisy copies."""
NEAREST_RUNS, NEAREST_SHARE = 800, 0.1
"""Runs of the network that such a search is reckoned to take; and the share of the time that all searches may take."""


@dataclass(frozen=True)
class CurvePoint:
    """At one noise level: the share of answers that are right (without labels: unchanged), with a 95 % band."""

    sigma: float
    share: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Example:
    """One image with noisy copies, and the classes that the network takes them for."""

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
    """The moments of k scores of each image, chosen by `followed_scores`: (N, k) each."""

    outputs: Tensor
    mean: Tensor
    deviation: Tensor
    mean_error: Tensor
    deviation_error: Tensor
    method: str

    def place(self, number: int, label: int) -> int | None:
        """The index of a class among the followed ones of an image; None where it is not followed."""
        places = (self.outputs[number] == label).nonzero().flatten().tolist()
        return places[0] if places else None


@dataclass(frozen=True, eq=False)
class Level:
    """What plain samples say of N images at one noise level: (N,) each, `shares` and moments of k scores (N, k)."""

    sigma: float
    samples: Tensor
    """How many there are, (N,); a single one without noise."""
    flips: Tensor
    """How many of them are won by another class than the answer without noise."""
    right: Tensor
    """How many are won by the label, or without labels by the answer without noise."""
    rivals: Tensor
    """As in `Study`, like `lead` and `shares`."""
    lead: Tensor
    shares: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, sigma: float, survey: Survey, clean: Tensor, followed: Tensor, right_classes: Tensor) -> Level:
        """From a survey, with scores `clean` (N, d) without noise and the classes that count as right, (N,)."""
        predicted = clean.argmax(1, keepdim=True)
        flips = survey.samples - survey.wins.gather(1, predicted).squeeze(1)
        best = clean.scatter(1, predicted, -torch.inf).argmax(1)
        rivals = torch.where(flips > 0, survey.wins.scatter(1, predicted, -1).argmax(1), best)
        right = survey.wins.gather(1, right_classes.unsqueeze(1)).squeeze(1)
        shares = survey.wins.gather(1, followed) / survey.samples.double().unsqueeze(1)
        rows = (survey.samples, flips, right, rivals, survey.lead, shares, survey.mean, survey.deviation)
        return cls(sigma, *(row.cpu() for row in rows))

    @classmethod
    def without_noise(cls, clean: Tensor, followed: Tensor, right_classes: Tensor) -> Level:
        ones = torch.ones(len(clean), dtype=torch.int64, device=clean.device)
        wins = functional.one_hot(clean.argmax(1), clean.shape[1])
        mean = clean.gather(1, followed).double()
        zeros, lead = torch.zeros_like(mean), torch.full_like(mean[:, 0], torch.inf)
        return cls.of(0.0, Survey(ones, wins, mean, zeros, zeros, zeros, lead), clean, followed, right_classes)

    @cached_property
    def flip(self) -> Tensor:
        """How often each image flips, (N,)."""
        return self.flips / self.samples.double()

    @cached_property
    def interval(self) -> Tensor:
        """The 95 % intervals of `flip`, (N, 2); without noise nothing is left to chance."""
        interval = shares_interval(self.flips, self.samples)
        return interval if self.sigma > 0 else torch.zeros_like(interval)

    def of_images(self) -> dict[str, Any]:
        """The fields of a `Study` that these samples alone give at this level."""
        return {
            "shares": self.shares, "samples": self.samples, "lead": self.lead, "flip": self.flip, "runs": self.samples,
            "interval": self.interval, "route": ("frequencies",) * len(self.flips), "rivals": self.rivals,
        }  # fmt: skip

    def point(self, which: Tensor | slice = slice(None)) -> CurvePoint:
        """The share of right answers over some of the images, with a band of two standard errors (0 without noise)."""
        right, samples = self.right[which], self.samples[which]
        share = float((right / samples.double()).mean())
        error = 2 * expected_share_error(right, samples) if self.sigma > 0 else 0.0
        return CurvePoint(self.sigma, share, max(0.0, share - error), min(1.0, share + error))


@dataclass(frozen=True, eq=False)
class Study:
    """Everything that a report shows, for N images, k scores that are shown of each, and L noise levels."""

    config: StudyConfig
    images: LabelledImages
    classes: tuple[str, ...]
    predicted: Tensor
    """The answers without noise, (N,)."""
    count: int
    """How many classes the network has."""
    scores: Scores
    shares: Tensor
    """The shares of the samples at the chosen noise that the classes whose scores are shown won, (N, k)."""
    samples: Tensor
    """How many samples there were at the chosen noise, (N,)."""
    lead: Tensor
    """How many standard deviations the answer's score is ahead of the best other, (N,)."""
    flip: Tensor
    """How often another class than the network's answer without noise wins, (N,)."""
    interval: Tensor
    """The 95 % intervals of `flip`, (N, 2)."""
    runs: Tensor
    """The runs of the network that finding `flip` took, (N,)."""
    route: tuple[str, ...]
    """How `flip` was found for each image: "frequencies", "importance", "splitting", …"""
    rivals: Tensor
    """The class that wins most often instead; where no flip was seen, the one with the best other score, (N,)."""
    levels: tuple[Level, ...]
    """What samples say at each level, beginning without noise."""
    copies: Tensor | None = None
    """The answers (L, N, c) to the noisy copies that `pictures.drawn_noise` gives; None where these are not shown."""
    examples: tuple[Example, ...] = ()
    nearest: tuple[FlippedImage, ...] = ()
    """Nearest flips of the images shown first, as far as they were found and time allowed."""
    attacks: AttackStudy | NotAttacked | None = None
    """Noise made to fool the network, or why there is none; None where none was asked for."""
    stopped: str = ""
    """What ended the work early, if anything did."""
    seconds: float = 0.0

    @classmethod
    def of_samples(
        cls, config: StudyConfig, images: LabelledImages, classes: tuple[str, ...], count: int, predicted: Tensor,
        outputs: Tensor, errors: tuple[Tensor, Tensor], levels: tuple[Level, ...],
    ) -> Study:  # fmt: skip
        """The study as far as samples go, with the `errors` of the followed scores' mean and deviation, (N, k)."""
        chosen = next(level for level in levels if math.isclose(level.sigma, config.sigma))
        scores = Scores(outputs, chosen.mean, chosen.deviation, *errors, "sampling")
        return cls(config, images, classes, predicted, count, scores, **chosen.of_images(), levels=levels)

    @property
    def curve(self) -> tuple[CurvePoint, ...]:
        """The accuracy at each level, beginning without noise."""
        return tuple(level.point() for level in self.levels)

    @property
    def order(self) -> Tensor:
        """The images, the most fragile first, (N,): by flip probability, or by lead where that has only a bound."""
        key = torch.where(self.bounded, 1 / (1 + self.lead.clamp(min=0)) - 2, self.flip)
        return key.argsort(descending=True, stable=True)

    @property
    def clean_accuracy(self) -> float | None:
        return float((self.predicted == self.kinds).double().mean()) if self.labelled else None

    @property
    def half_width(self) -> Tensor:
        """Half the widths of the intervals, (N,)."""
        return (self.interval[:, 1] - self.interval[:, 0]) / 2

    @property
    def bounded(self) -> Tensor:
        """Where only an upper bound of the flip probability is known, (N,)."""
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
        """The label of an image; None where labels are unknown."""
        return None if self.images.labels is None else int(self.images.labels[number])

    def nearest_flip(self, number: int) -> FlippedImage | None:
        """The nearest flip of an image, where one was looked for and found."""
        return next((flipped for flipped in self.nearest if flipped.image == number), None)

    def at(self, place: int) -> Study:
        """The study as if it were about the level with this index, of which it knows what samples say."""
        level = self.levels[place]
        if math.isclose(level.sigma, self.config.sigma):
            return self
        scores = dataclasses.replace(self.scores, mean=level.mean, deviation=level.deviation)
        return dataclasses.replace(self, scores=scores, **level.of_images())


def study(
    network: Any, images: LabelledImages, config: StudyConfig, classes: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Study:  # fmt: skip
    """Compute a `Study`; `say` is told what it will take. Ctrl-C after the first samples of all keeps what is known."""
    start = time.perf_counter()
    network = network_of(network.to(config.device) if isinstance(network, nn.Module) else network, CALLER)
    pixels = images.images.to(config.device)
    model = classifier(network, pixels, config)
    images, names = with_classes_of(images, classes, model.outputs, CALLER)
    plan = TimePlan.of(model, len(images), config)
    say(plan.in_words(len(images)))
    done = model.answer(lambda: _studied(model, pixels, images, names, config, plan))
    attacks = attacks_on(network, done)
    return dataclasses.replace(done, attacks=attacks, seconds=time.perf_counter() - start)


def survey_of(network: nn.Module, images: LabelledImages, config: StudyConfig, plan: TimePlan) -> Study:
    """The flips of some images by samples alone, and their curve: a part of a study of many images, or nothing."""
    network, pixels = network.to(config.device), images.images.to(config.device)
    model = classifier(network_of(network, CALLER), pixels, config)
    samples_only = dataclasses.replace(config, rare=0, examples=0, attacks=0)
    part = model.answer(lambda: _studied(model, pixels, images, (), samples_only, plan))
    if part.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    return part


def classifier(network: nn.Module, pixels: Tensor, config: StudyConfig) -> NetworkModel:
    """The model of a network, after checking that it gives each image two scores or more, and has the attacks' ReLU."""
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
    """How many samples and how much time the parts of a study get."""

    cost: float
    """Seconds that a run of the network takes, in a batch."""
    first: int
    """Samples of each image in the first round."""
    curve: int
    """Samples of each image at each other level of the curve."""
    survey_seconds: float
    """The time for samples at the chosen noise; `seconds` is that for everything."""
    seconds: float

    @classmethod
    def of(cls, model: NetworkModel, images: int, config: StudyConfig) -> TimePlan:
        with torch.no_grad():
            cost = fast_network(model).cost
        seconds = config.allowance(images)
        per_image = seconds / (cost * images)
        first = int(min(max(0.25 * per_image, FIRST_ROUND[0]), FIRST_ROUND[1], config.samples))
        affordable = max(0.2 * per_image / (len(RELATIVE_LEVELS) - 1), CURVE_SAMPLES[0])
        curve = int(min(affordable, cls.without_limit(images).curve, max(config.samples, 2)))
        return cls(cost, first, curve, 0.5 * seconds, seconds)

    @classmethod
    def without_limit(cls, images: int) -> TimePlan:
        """The plan without a limit of time, which is the same on any machine."""
        _, enough, most = CURVE_SAMPLES
        return cls(0.0, FIRST_ROUND[1], int(min(max(CURVE_TOTAL / images, enough), most)), math.inf, math.inf)

    def in_words(self, images: int) -> str:
        """What the study will take, to be said before it begins."""
        least = images * (self.first + (len(RELATIVE_LEVELS) - 1) * self.curve)
        return (
            f"{images:,} images, {1e3 * self.cost:.2g} ms a run: at least {least:,} runs of the network "
            f"({seconds_in_words(least * self.cost)}), at most about {seconds_in_words(self.seconds)} (--seconds)"
        )


def _studied(
    model: NetworkModel, pixels: Tensor, images: LabelledImages, names: tuple[str, ...], config: StudyConfig,
    plan: TimePlan,
) -> Study:  # fmt: skip
    """All parts of a study but the attacks, one after the other; an interruption keeps those that are done."""
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
    survey_clock, seed = Clock(plan.survey_seconds), random_seed(config.seed, "survey", 0)
    survey = surveyed(
        model, noise, predicted, followed, goal, seed=seed, clock=survey_clock, description="flips of all images"
    )
    so_far = _of_survey(config, images, names, clean, followed, survey)
    if bool(((so_far.half_width > config.tolerance) & (so_far.samples < config.samples)).any()):
        so_far = dataclasses.replace(so_far, stopped=TIME_IS_OVER)
    try:
        levels = _levels(model, pixels, clean, followed, so_far, plan.curve)
        so_far = _rare(model, noise, dataclasses.replace(so_far, levels=levels), clock)
        if so_far.stopped == INTERRUPTED:
            return so_far
        so_far = dataclasses.replace(
            so_far, scores=_scores(model, noise, so_far), examples=examples_of(model, noise, so_far),
            copies=_answers_to_copies(model, pixels, so_far, plan),
        )  # fmt: skip
        if numbers := nearest_candidates(so_far):
            numbers = numbers[: int(NEAREST_SHARE * plan.seconds / (NEAREST_RUNS * plan.cost))]
            nearest = nearest_of(model, noise, numbers, predicted[numbers], config.seed)
            so_far = dataclasses.replace(so_far, nearest=nearest)
    except KeyboardInterrupt:
        so_far = dataclasses.replace(so_far, stopped=INTERRUPTED)
    return so_far


def followed_scores(clean: Tensor, labels: Tensor | None, largest: int) -> Tensor:
    """The classes whose scores are shown, (N, k): all of a few, else those of the largest scores and the label."""
    count = clean.shape[1]
    if count <= max(ALL_SCORES, largest):
        return torch.arange(count, device=clean.device).expand(len(clean), -1)
    rows = clean.topk(largest, 1).indices
    if labels is not None:
        missing = ~(rows == labels.unsqueeze(1)).any(1)
        rows[missing, -1] = labels[missing]
    return rows


def _of_survey(
    config: StudyConfig, images: LabelledImages, names: tuple[str, ...], clean: Tensor, followed: Tensor, survey: Survey
) -> Study:
    """The study as far as samples without noise and at the chosen noise go."""
    count, predicted = clean.shape[1], clean.argmax(1)
    right_classes = predicted if images.labels is None else images.labels.to(clean.device)
    without_noise = Level.without_noise(clean, followed, right_classes)
    chosen = Level.of(config.sigma, survey, clean, followed, right_classes)
    errors, levels = (survey.mean_error.cpu(), survey.deviation_error.cpu()), (without_noise, chosen)
    return Study.of_samples(config, images, names, count, predicted.cpu(), followed.cpu(), errors, levels)


def _levels(
    model: NetworkModel, pixels: Tensor, clean: Tensor, followed: Tensor, so_far: Study, count: int
) -> tuple[Level, ...]:
    """All levels, with `count` samples of each image at the missing ones, whose noise differs in its scale alone."""
    config, predicted, right_classes = so_far.config, clean.argmax(1), so_far.kinds.to(clean.device)
    without_noise, chosen = so_far.levels
    levels, goal = [without_noise], SurveyGoal(1.0, count, count)
    with progress_bar("accuracy over noise", len(RELATIVE_LEVELS)) as show:
        for level, sigma in zip(RELATIVE_LEVELS, config.levels, strict=True):
            show(len(levels) - 1)
            if math.isclose(level, 1.0):
                levels.append(chosen)
            else:
                noise, seed = config.noise(pixels, level), random_seed(config.seed, "curve", 0)
                survey = surveyed(model, noise, predicted, followed, goal, seed=seed)
                levels.append(Level.of(sigma, survey, clean, followed, right_classes))
    return tuple(levels)


def _rare(model: NetworkModel, noise: Gaussian, so_far: Study, clock: Clock) -> Study:
    """The study with the flip probabilities of the images nearest to flipping, as far as the time goes."""
    numbers, seconds, refined = rare_candidates(so_far), seconds_left(clock), list[Refined]()
    if not numbers:
        return so_far
    try:
        for row in refined_together(model, noise, numbers, so_far.predicted[numbers].tolist(), so_far.config, seconds):
            refined.append(row)
        stopped = TIME_IS_OVER if clock.over else so_far.stopped
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    return dataclasses.replace(with_refined(so_far, refined), stopped=stopped)


def seconds_left(clock: Clock) -> float | None:
    """The seconds until the time is over, at least a moment; None without a limit."""
    if clock.seconds is None or math.isinf(clock.seconds):
        return None
    return max(1e-9, clock.seconds - (time.perf_counter() - clock.start))


def rare_candidates(so_far: Study) -> list[int]:
    """The images nearest to flipping, without those whose samples show flips often enough for the relative error."""
    nearest = so_far.order if so_far.config.rare is None else so_far.order[: so_far.config.rare]
    seen = so_far.flip * so_far.samples
    return [number for number in nearest.tolist() if float(seen[number]) < RELATIVE_ERROR**-2]


@dataclass(frozen=True)
class Refined:
    """What `entries_found` gave for one image."""

    number: int
    flip: float
    low: float
    high: float
    runs: int
    route: str
    rival: int
    """The class that wins most often instead; −1 where no flip was seen."""


def refined_together(
    model: NetworkModel, noise: Gaussian, numbers: Sequence[int], labels: Sequence[int], config: StudyConfig,
    seconds: float | None = None,
) -> Iterator[Refined]:  # fmt: skip
    """The flip probabilities of the images with these numbers, as they are found; `noise` is that of all images."""
    goal = FlipGoal.read(CALLER, RELATIVE_ERROR, None, RARE_RUNS, seconds, config.seed)
    chosen = noise.entries(torch.tensor(list(numbers), device=noise.device))
    for place, (flip, runs) in entries_found(model, chosen, labels, goal, "rare flips"):
        yield Refined(numbers[place], flip.probability, *flip.interval, runs, flip.route, flip.rival)


def with_refined(so_far: Study, refined: Sequence[Refined]) -> Study:
    """The study with refined flip probabilities in place of those of samples, where they say more."""
    flip, interval, runs = so_far.flip.clone(), so_far.interval.clone(), so_far.runs.clone()
    route, rivals = list(so_far.route), so_far.rivals.clone()
    for image in refined:
        runs[image.number] += image.runs
        if image.flip > 0 or image.high < float(interval[image.number, 1]):
            flip[image.number], route[image.number] = image.flip, image.route
            interval[image.number] = torch.tensor([image.low, image.high], dtype=interval.dtype)
        if image.rival >= 0:
            rivals[image.number] = image.rival
    return dataclasses.replace(so_far, flip=flip, interval=interval, runs=runs, route=tuple(route), rivals=rivals)


def _scores(model: NetworkModel, noise: Gaussian, so_far: Study) -> Scores:
    """The scores that are shown: those that were sampled, or by the formula that was asked for."""
    if so_far.config.method == "auto":
        return so_far.scores
    outputs = so_far.scores.outputs
    moments = output_moments(model, noise, so_far.config.method, outputs).to("cpu")
    assert moments.error is not None
    deviation = moments.variance.sqrt()
    return Scores(
        outputs, moments.mean, deviation, moments.error.mean,
        moments.error.variance / (2 * deviation).clamp(min=1e-30), moments.method,
    )  # fmt: skip


def examples_of(model: NetworkModel, noise: Gaussian, so_far: Study) -> tuple[Example, ...]:
    """The images of `example_images` with noisy copies; `noise` is that of all images."""
    examples = []
    for number in example_images(so_far):
        generator = torch.Generator(noise.device).manual_seed(random_seed(so_far.config.seed, "copies", number))
        noisy = noise.entries(torch.tensor([number], device=noise.device)).sample(COPIES, generator=generator)[:, 0]
        with torch.inference_mode(False), torch.no_grad(), full_precision():
            classes = model.network(noisy.clone()).argmax(1)
        examples.append(Example(number, noisy.cpu(), classes.cpu()))
    return tuple(examples)


def _answers_to_copies(model: NetworkModel, pixels: Tensor, so_far: Study, plan: TimePlan) -> Tensor | None:
    """The answers (L, N, c) to the noisy copies that a page draws itself, if it can draw them and time allows."""
    config, levels = so_far.config, [level.sigma for level in so_far.levels]
    seconds = plan.cost * len(levels) * len(pixels) * COPIES
    are_drawn = config.examples and config.covariance is None and drawable(pixels[0])
    if not are_drawn or seconds > COPIES_SHARE * plan.seconds:
        return None
    answers = torch.empty(len(levels), len(pixels), COPIES, dtype=torch.int64)
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        sigmas = torch.tensor(levels, dtype=pixels.dtype, device=pixels.device).reshape(-1, *(1 for _ in pixels.shape))
        for number, image in enumerate(pixels):
            noisy = image + sigmas * drawn_noise(number, COPIES, image.shape).to(image)
            answers[:, number] = model.network(noisy.flatten(0, 1)).argmax(1).reshape(-1, COPIES).cpu()
    return answers


def example_images(so_far: Study) -> list[int]:
    """The images that are shown with noisy copies: half are the most fragile, the others evenly down the ranking."""
    ranking = so_far.order.tolist()
    count = min(so_far.config.examples, len(ranking))
    fragile = (count + 1) // 2
    rest = ranking[fragile:]
    spread = [rest[(2 * i + 1) * len(rest) // (2 * (count - fragile))] for i in range(count - fragile)]
    return ranking[:fragile] + spread


def nearest_candidates(so_far: Study) -> list[int]:
    """The images whose nearest flip is looked for: those with noisy copies, and the most fragile ones."""
    if not so_far.config.examples:
        return []
    return list(dict.fromkeys([*example_images(so_far), *so_far.order[:NEAREST].tolist()]))


def nearest_of(
    model: NetworkModel, noise: Gaussian, numbers: Sequence[int], labels: Tensor, seed: int
) -> tuple[FlippedImage, ...]:
    """The nearest flips of images with these numbers and answers, as far as they were found."""
    if not numbers:
        return ()
    chosen = noise.entries(torch.tensor(list(numbers), device=noise.device))
    flips = nearest_flip(model, chosen, labels.to(noise.device), seed=seed)
    rows = zip(numbers, flips.noise.cpu(), flips.distance.tolist(), flips.rival.tolist(), strict=True)
    return tuple(FlippedImage(*row) for row in rows if math.isfinite(row[2]))


def attacks_on(network: nn.Module, so_far: Study) -> AttackStudy | NotAttacked | None:
    """Noise made to fool the network, on a few of the images that it gets right; None where none was asked for."""
    config = so_far.config
    if not config.attacks:
        return None
    if so_far.stopped:
        return NotAttacked(f"No noise was made: {so_far.stopped} ended the work before.")
    attack = SparseSmooth(layer=config.layer, seed=config.seed)
    return few_attacks(network, so_far.images, so_far.classes, so_far.predicted, attack, config.attacks, config.device)

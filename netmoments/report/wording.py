"""The same words in the terminal and on the page."""

from __future__ import annotations

from netmoments.report.study import Study


def answer_share(found: Study) -> str:
    """What the curve shows."""
    return "Answers that stay the same" if found.right is None else "Answers that are right"


def probability_in_words(value: float) -> str:
    """A probability as a percentage; what is too small for the model behind it is said to be small, never zero."""
    if value < 1e-6:
        return "< 1e-6"
    if value < 0.0005:
        return f"{value:.0e}"
    if value > 0.9995:
        return "> 99.9%"
    return f"{value:.1%}"


def frequency_in_words(value: float, samples: int) -> str:
    """A sampled frequency; none at all says of how many."""
    if value == 0:
        return f"0 of {samples:,}"
    return f"all {samples:,}" if value == 1 else f"{value:.1%}"


def checked_in_words(found: Study) -> str:
    """Which images were sampled."""
    count = len(found.checks)
    if count == 1:
        return "the most fragile image"
    return f"{count} images" if count == len(found.images) else f"{count} images, half of them the most fragile"


def verdict_in_words(found: Study) -> str:
    """How far to trust the computed probabilities at this noise, by the images that were sampled."""
    gap = found.largest_check_error
    if gap is None:
        return "Nothing was sampled to check the computed probabilities."
    if gap <= 0.05:
        return f"Computed flip probabilities are within {max(gap, 0.001):.3f} of the sampled ones."
    off = f"Computed flip probabilities are off by up to {gap:.2f} at this noise: "
    if gap <= 0.15:
        return off + "take them as rough."
    return off + "it is too large for the linearization. Rely on samples, or use less noise."


def method_in_words(found: Study) -> str:
    few = ""
    if found.followed < found.scores.shape[1]:
        few = (
            f" Of the {found.scores.shape[1]:,} scores only the {found.followed} largest of each image were followed: "
            f"flips to other classes are not counted, so the probabilities are lower bounds."
        )
    return (
        f"Every image was linearized before and after the ReLU {found.moments.cut!r} (two-stage linearization), which "
        f"is then treated exactly: the mean and covariance of the scores under Gaussian noise on every pixel come from "
        f"formulas, and the probability that each class wins from those. Linearization errs more as noise grows, and "
        f"at any noise where max-pools have exact ties (flat backgrounds); the sampled images show by how much. Noise "
        f"is added to pixels in [0, 1] and not clipped.{few}"
    )

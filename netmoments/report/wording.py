"""The same words in the terminal and on the page."""

from __future__ import annotations

from netmoments.report.study import Study


def answer_share(found: Study) -> str:
    """What the curve shows."""
    return "Answers that stay the same" if found.right is None else "Answers that are right"


def probability_in_words(value: float) -> str:
    """A probability as a percentage, small ones as a power of ten; nothing is rounded to never or always."""
    if value == 0:
        return "never"
    if value < 0.0005:
        return f"{value:.1g}" if value >= 1e-4 else f"{value:.0e}"
    if value > 0.9995:
        return f"{1 - value:.0e} from always" if value < 1 else "always"
    return f"{value:.1%}"


def method_in_words(found: Study) -> str:
    return (
        f"Every image was linearized before and after the ReLU {found.moments.cut!r} (two-stage linearization), which "
        f"is then treated exactly: the mean and covariance of the scores under Gaussian noise on every pixel come from "
        f"formulas, and the probability that each class wins from those. Linearization is exact for small noise and "
        f"errs as noise grows; the sampled images show by how much. Noise is added to pixels in [0, 1] and not clipped."
    )

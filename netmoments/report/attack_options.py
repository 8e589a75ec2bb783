"""Which attack the words of the command line mean; an option that an attack does not have is an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from netmoments.attacks import PixelSupport, SparseSmooth, Targeted
from netmoments.attacks.attack import Attack

Kind = Literal["sparse-smooth", "targeted", "pixels"]
OWN_OPTIONS: dict[str, tuple[Kind, ...]] = {
    "gamma": ("sparse-smooth",),
    "beta": ("targeted", "pixels"),
    "percent": ("pixels",),
    "rivals": ("sparse-smooth", "pixels"),
}
"""Options that not every kind has."""
NEEDED: dict[Kind, dict[str, str]] = {
    "targeted": {"target": "the class that the images are to be taken for"},
    "pixels": {"percent": "the share of the pixels whose mean changes, for example --percent 10"},
}


@dataclass(frozen=True, kw_only=True)
class AttackOptions:
    """What was typed; None where nothing was, and the attack has its own default."""

    kind: Kind
    target: str | None = None
    confidence: float | None = None
    gamma: float | None = None
    sigma: float | None = None
    beta: float | None = None
    percent: float | None = None
    rivals: int | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        for option, kinds in OWN_OPTIONS.items():
            if getattr(self, option) is not None and self.kind not in kinds:
                raise ValueError(f"--{option} is for --kind {' and '.join(kinds)}, not for {self.kind}; leave it out")
        for option, meaning in NEEDED.get(self.kind, {}).items():
            if getattr(self, option) is None:
                raise ValueError(f"--kind {self.kind} needs --{option}, {meaning}")
        if self.confidence is not None and self.gamma is not None:
            raise ValueError("give --confidence (a share of the samples) or --gamma (a margin), not both")
        if self.target is not None and self.rivals is not None:
            raise ValueError("--rivals is for attacks without --target, which try several classes; leave one out")

    def attack(self, **shared: Any) -> Attack:
        """The attack, with settings that every attack has: bounds, layer, polish, samples, seed."""
        if self.kind == "sparse-smooth":
            own = {"sigma": self.sigma, "confidence": self.confidence, "gamma": self.gamma}
            return SparseSmooth(**shared, **self._given(**own, rivals=self.rivals, iterations=self.iterations))
        own = {"largest_sigma": self.sigma, "wanted": self.confidence, "beta": self.beta}
        if self.kind == "targeted":
            return Targeted(**shared, **self._given(**own, iterations=self.iterations))
        more = self._given(**own, rivals=self.rivals, iterations=self.iterations)
        return PixelSupport(percent=self.percent, **shared, **more)

    @staticmethod
    def _given(**options: Any) -> dict[str, Any]:
        """Those that were typed."""
        return {name: value for name, value in options.items() if value is not None}

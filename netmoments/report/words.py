"""Numbers as they are shown in the terminal, in Markdown and on pages; and where they come from."""

from __future__ import annotations

import math
import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

import torch as pytorch

from netmoments import __version__


def in_words(value: float) -> str:
    """A number with three digits; whole with separators from a thousand on; scientific below 1e-3 and from 1e9 on.

    >>> [in_words(value) for value in (0.12345, 2.2e-16, -1234567.8, 999.9, 5, 0)]
    ['0.123', '2.2e-16', '-1,234,568', '1,000', '5', '0']
    """
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    rounded = float(f"{value:.3g}")
    if rounded == 0:
        return "0"
    if abs(rounded) < 1e-3 or abs(rounded) >= 1e9:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"


def at_most_in_words(bound: float) -> str:
    """A probability that is not exceeded, rounded up to two digits: a percentage, below a thousandth scientific.

    >>> [at_most_in_words(bound) for bound in (1.0, 3 / 192, 0.0031, 2.91e-7)]
    ['100%', '1.6%', '0.31%', '3e-7']
    """
    if bound <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(bound)) - 1)
    rounded = unit * math.ceil(bound / unit - 1e-5)
    return f"{100 * rounded:.2g}%" if 0.001 <= rounded < 0.995 else "100%" if rounded > 0.5 else in_words(rounded)


def interval_in_words(value: float, low: float, high: float) -> tuple[str, str, str]:
    """A probability and the ends of its interval, all above 0, with as many digits as the interval is narrow.

    >>> interval_in_words(0.4027, 0.39297, 0.41245)
    ('0.40', '0.39', '0.41')
    >>> interval_in_words(1.29e-4, 1.116e-4, 1.49e-4)
    ('1.3e-4', '1.1e-4', '1.5e-4')
    >>> interval_in_words(1 / 192, 9.2e-4, 0.0289)
    ('0.0052', '9.2e-4', '0.029')
    """
    last = math.floor(math.log10((high - low) / 1.5)) if high > low else -15
    return _to_place(value, last), _to_place(low, last), _to_place(high, last)


def _to_place(value: float, last: int) -> str:
    """A probability down to the digit of 10^last, with two to four digits; scientific below a thousandth."""
    if value <= 0:
        return "0"
    first = math.floor(math.log10(value))
    place = max(min(last, first - 1), first - 3)
    rounded = round(value / 10.0**place) * 10.0**place
    if rounded >= 0.9995e-3:
        return f"{rounded:.{max(0, -place)}f}"
    mantissa, _, exponent = f"{rounded:.{math.floor(math.log10(rounded) + 1e-9) - place}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def seconds_in_words(seconds: float) -> str:
    """A time in seconds, in minutes and seconds, or in hours and minutes.

    >>> [seconds_in_words(value) for value in (0.0123, 59.7, 250, 5000)]
    ['0.0123 s', '59.7 s', '4 min 10 s', '1 h 23 min']
    """
    if seconds < 60:
        return f"{in_words(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


@dataclass(frozen=True)
class Provenance:
    """Where the numbers of a report come from, in enough detail to make them again."""

    command: str
    date: str
    netmoments: str
    torch: str
    python: str
    device: str
    seed: int

    @classmethod
    def of_this_run(cls, device: pytorch.device, seed: int) -> Provenance:
        """The provenance of results computed just now, here, by the command that was typed."""
        command, date = shlex.join(["netmoments", *sys.argv[1:]]), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        python, name = platform.python_version(), device_in_words(device)
        return cls(command, date, __version__, pytorch.__version__, python, name, seed)


def device_in_words(device: pytorch.device) -> str:
    """The name of a GPU, or how many threads a CPU computes with."""
    if device.type == "cuda":
        return pytorch.cuda.get_device_name(device) if pytorch.cuda.is_available() else "GPUs elsewhere"
    threads = pytorch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"

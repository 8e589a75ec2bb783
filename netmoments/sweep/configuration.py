"""The configuration that the results in a folder belong to, and what is said when another one is wanted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from netmoments import __version__
from netmoments.files import write_text_whole
from netmoments.sweep.item import Sweep

FILE = "_configuration.json"  # readers of parquet folders pass over names that begin so
ADDED = ("device", "netmoments", "work items")
"""What every configuration has besides the sweep's own."""


def full_configuration(sweep: Sweep, device_type: str) -> dict[str, Any]:
    """The sweep's own, as it comes back from JSON; the kind of device and the version that compute it; and how the work
    is divided: an item's number means nothing else."""
    for key in ADDED:
        if key in sweep.configuration:
            raise ValueError(
                f"the configuration of {sweep.name} has a key {key!r}, which is taken; give it another name"
            )
    runs = [(count, len(list(run))) for count, run in groupby(sweep.counts)]
    division = ", ".join(f"{times} of {count} {sweep.unit}" for count, times in runs)
    try:
        added = dict(zip(ADDED, (device_type, __version__, division), strict=True))
        return json.loads(_canonical({**sweep.configuration, **added}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"the configuration of {sweep.name} must be plain JSON: {error}") from error


def fingerprint(configuration: Any) -> str:
    return hashlib.sha256(_canonical(configuration).encode()).hexdigest()


def _canonical(configuration: Any) -> str:
    return json.dumps(configuration, sort_keys=True, separators=(",", ":"), allow_nan=False)


def settle(folder: Path, configuration: Mapping[str, Any], has_results: bool) -> None:
    """Write the configuration into a folder that has none, or see that the one there is the same."""
    path = folder / FILE
    if path.exists():
        _compare(path, configuration)
    elif has_results:
        raise ValueError(f"{folder} has results but no {FILE} that says of what; give another --out, or remove it")
    else:
        write_text_whole(path, json.dumps(configuration, indent=1, sort_keys=True, allow_nan=False) + "\n")


def require_same(out: Path, sweeps: Iterable[Sweep], device_type: str) -> None:
    """That the folders there are of these sweeps belong to them: said of all at once, before any is computed."""
    problems = []
    for sweep in sweeps:
        path = out / sweep.name / FILE
        if path.exists():
            try:
                _compare(path, full_configuration(sweep, device_type))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def _compare(path: Path, wanted: Mapping[str, Any]) -> None:
    try:
        there = json.loads(path.read_bytes())
        same = _canonical(there) == _canonical(wanted)  # 1 and 1.0 are equal, but not the same
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); give another --out, or remove its folder") from error
    if not isinstance(there, dict):
        raise ValueError(f"{path} is damaged (a JSON object was wanted); give another --out, or remove its folder")
    if not same:
        pairs = [(key, _shown(wanted, key), _shown(there, key)) for key in sorted({*there, *wanted})]
        lines = [f"  {key}: wanted {want}, there {found}" for key, want, found in pairs if want != found]
        said = f"{path} is of another configuration; repeat its options, give another --out, or remove the folder:"
        raise ValueError("\n".join([said, *lines]))


def _shown(configuration: Mapping[str, Any], key: str) -> str:
    if key not in configuration:
        return "nothing"
    text = json.dumps(configuration[key], sort_keys=True)
    return text if len(text) <= 200 else f"{text[:180]}… ({fingerprint(configuration[key])[:8]})"

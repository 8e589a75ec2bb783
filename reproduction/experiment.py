"""Define an experiment: its `Settings`, its `Outcome`, and the list of all experiments."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from netmoments.report.words import Provenance, device_in_words
from netmoments.sweep.item import Engine, Finished, Sweep
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine
from netmoments.sweep.run import Results, run_sweep
from netmoments.sweep.store import require_same

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODULES = {
    "figure-1": "figure_1",
    "figure-2": "figure_2",
    "table-1": "table_1",
    "table-2": "table_2",
    "seeds": "seeds",
    "readings-2": "readings_2",
    "table-3": "table_3",
    "table-4": "table_4",
    "figure-3": "figure_3",
    "figure-4": "figure_4",
    "figure-5": "figure_5",
    "figure-6": "figure_6",
    "figure-7": "figure_7",
    "table-5": "table_5",
    "figure-8": "figure_8",
    "figure-9": "figure_9",
    "readings-5": "readings_5",
    "readings-2019": "readings_2019",
    "frontier": "frontier",
    "moments-training": "moments_training",
}
"""The module of each experiment by its name on the command line, in the order of the report."""
NAMES = tuple(MODULES)
ENGINES = ("local", "ray")
RUNS = "_runs.jsonl"
"""A file in the folder of a sweep, with a line for every run that computed any of its rows."""


@dataclass(frozen=True)
class BesidePaper:
    """One number of ours beside the paper's, where it has one."""

    what: str
    ours: float
    paper: float | None

    @property
    def difference(self) -> float | None:
        return None if self.paper is None else self.ours - self.paper


@dataclass(frozen=True)
class Panel:
    """A table whose cells are already text; `emphasis` names the columns that matter most."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    emphasis: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()
    """Rows before which a new group begins."""


@dataclass(frozen=True)
class Drawing:
    """A figure that is drawn when needed; its name is that of its file, without the suffix.

    The function that draws it can be pickled, so that another machine than the one that computed it can draw it.
    """

    name: str
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Outcome:
    """One table or figure of the paper, reproduced."""

    name: str
    """The name on the command line, such as figure-2 or table-4."""
    title: str
    reading: tuple[str, ...]
    """Paragraphs that say what was done, which reading of the paper was chosen, and what can be seen."""
    comparisons: tuple[BesidePaper, ...]
    panels: tuple[Panel, ...]
    drawings: tuple[Drawing, ...]
    numbers: dict[str, Any]
    """All results in machine-readable form: plain values, lists and dictionaries."""
    seconds: float
    """Time of the work itself, summed over all runs that contributed."""
    details: tuple[Panel, ...] = ()
    """Panels for the files and the page that are too long for a terminal."""


FEW, FEW_SAMPLES = 25, 1000
"""With fewer images a run only shows that everything works; and the samples that it takes unless told otherwise."""


@dataclass(frozen=True)
class Settings:
    """The settings of every experiment: how much to compute, where, from which seed, and by which engine."""

    out: Path
    engine: Engine
    device: torch.device
    images: int = 10_000
    samples: int = 10_000
    seed: int = 0
    data_dir: Path | None = None
    weights: Path | None = None
    """Weights to use in place of the shipped ones."""
    model: str = "lenet"
    """The network that figure-1 draws: a name of the zoo, an exported program, or file.py:factory."""
    layer: int | str = -1
    """The ReLU that figure-1 keeps."""
    gallery: Path | None = None
    """A folder of networks that `frontier` measures too."""
    deadline: float | None = None
    """When to stop, as a value of `time.monotonic`; whatever is finished by then is kept."""
    started: float = field(default_factory=time.monotonic)
    used: list[str] = field(default_factory=list)
    """The names of the sweeps that were run so far."""

    @property
    def few(self) -> bool:
        """Whether there are so few images that a run only shows, in minutes on a CPU, that everything works."""
        return self.images < FEW

    @property
    def here(self) -> torch.device:
        """The device on which this process itself computes: a Ray cluster may have GPUs where this machine has none."""
        return self.device if self.device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")

    def run(self, sweep: Sweep) -> Results:
        """All results of a sweep: load those of earlier runs, and compute what is missing."""
        self.used.append(sweep.name)
        engine = self.engine if self.deadline is None else Until(self.engine, self.deadline)
        return run_sweep(sweep, self.out, Recorded(engine, self.out, machine_here(self.device)))

    def check(self, *sweeps: Sweep) -> None:
        """Require, before computing, that results of these sweeps in the output folder are of this configuration."""
        require_same(self.out, sweeps, self.engine.device_type)

    def require_time(self, name: str, done: int, total: int, unit: str) -> None:
        """Require that there is time left, before long work that is not a sweep."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise Unfinished(name, done, total, unit, time.monotonic() - self.started)


def experiments_named(name: str) -> Sequence[str]:
    """The experiments that a name on the command line stands for: one of them, or all."""
    if name == "all":
        return NAMES
    if name not in MODULES:
        raise ValueError(f"no experiment {name!r}; there are {', '.join(NAMES)}, and all")
    return (name,)


def reproduce(name: str, settings: Settings) -> Outcome:
    """Run one experiment, or what is missing of it, and return its outcome."""
    module = importlib.import_module(f"reproduction.{MODULES[name]}")
    outcome: Outcome = module.reproduce(settings)
    return outcome


def engine_named(name: str, device: torch.device, address: str | None = None) -> Engine:
    """The engine that a name on the command line stands for.

    local: this process, or every GPU here if the device is `cuda` without a number. ray: a Ray cluster, whose
    machines have this checkout in the same folder, or on their PYTHONPATH.
    """
    if name not in ENGINES:
        raise ValueError(f"no engine {name!r}; there are {' and '.join(ENGINES)}")
    if name == "ray":
        return RayEngine(str(device), address, threads=torch.get_num_threads())
    if address is not None:
        raise ValueError(f"an address ({address}) is for the engine ray; give --engine ray too")
    return LocalEngine(_local_devices(device))


def _local_devices(device: torch.device) -> list[str]:
    if device.type == "cuda" and device.index is None and torch.cuda.device_count() > 1:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [str(device)]


class Unfinished(Exception):
    """The time was up before the sweep was done."""

    def __init__(self, name: str, done: int, total: int, unit: str, seconds: float) -> None:
        super().__init__(name, done, total, unit, seconds)
        self.name, self.done, self.total, self.unit, self.seconds = name, done, total, unit, seconds

    def __str__(self) -> str:
        took = f"{self.seconds / 60:.1f} minutes" if self.seconds >= 60 else f"{self.seconds:.1f} seconds"
        return (
            f"{self.name}: {self.done:,} of {self.total:,} {self.unit} done, stopped after {took}; "
            "run the same command again to go on"
        )


@dataclass(frozen=True)
class Until:
    """An engine with a deadline: the first item that finishes after it while others are missing raises `Unfinished`."""

    engine: Engine
    deadline: float
    """As a value of `time.monotonic`."""

    @property
    def device_type(self) -> str:
        return self.engine.device_type

    def results(self, sweep: Sweep, items: Sequence[int]) -> Generator[Finished, None, None]:
        start, total, missing = time.monotonic(), sum(sweep.counts), sum(sweep.counts[item] for item in items)
        with closing(self.engine.results(sweep, items)) as results:
            for finished in results:
                yield finished
                missing -= sweep.counts[finished[0]]
                if missing and time.monotonic() >= self.deadline:
                    took = time.monotonic() - start
                    raise Unfinished(sweep.name, total - missing, total, sweep.unit, took)


@dataclass(frozen=True)
class Machine:
    """A machine that computed results: the name of its device, and its version of torch."""

    device: str
    torch: str


def machine_here(device: torch.device) -> Machine:
    """This machine."""
    return Machine(device_in_words(device), torch.__version__)


@dataclass(frozen=True)
class Recorded:
    """An engine that records the machine in the sweep's folder before it computes anything."""

    engine: Engine
    out: Path
    machine: Machine

    @property
    def device_type(self) -> str:
        return self.engine.device_type

    def results(self, sweep: Sweep, items: Sequence[int]) -> Generator[Finished, None, None]:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"date": date, "device": self.machine.device, "torch": self.machine.torch, "commit": commit_here()}
        line = json.dumps(facts)
        path = self.out / sweep.name / RUNS
        try:
            cut = path.exists() and not path.read_bytes().endswith(b"\n")  # by a disk that was full, or a kill
            with path.open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n" if cut else f"{line}\n")
        except OSError as error:
            raise OSError(error.errno, f"{path} could not be written: {error.strerror or error}") from error
        yield from self.engine.results(sweep, items)


def machines(out: Path, names: Iterable[str]) -> list[Machine]:
    """The machines that computed any rows of these sweeps, each once."""
    return list(dict.fromkeys(Machine(str(run["device"]), str(run["torch"])) for run in runs(out, names)))


def commits(out: Path, names: Iterable[str]) -> list[str]:
    """The commits of the code that computed any rows of these sweeps, each once; runs without a recorded commit have
    `UNKNOWN`."""
    return list(dict.fromkeys(str(run.get("commit", UNKNOWN)) for run in runs(out, names)))


def runs(out: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """The records of the runs of these sweeps; a line that a killed process left incomplete is skipped."""
    found = []
    for name in names:
        path = out / name / RUNS
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
                found.append({**record, "device": record["device"], "torch": record["torch"]})
            except (ValueError, KeyError, TypeError):
                continue
    return found


UNKNOWN = "unknown"
COMMIT = "NETMOMENTS_COMMIT"
"""The environment variable that names the commit of a copy without git."""
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Origin(Provenance):
    """The origin of an outcome's numbers, with the commit of the code; results without a recorded commit have none."""

    commit: str = UNKNOWN

    @classmethod
    def of(cls, settings: Settings, command: str) -> Self:
        """The origin as of now: the machines and commits that computed the sweeps used or, without sweeps, those of
        this process.
        """
        made = Provenance.of_this_run(settings.device, settings.seed)
        used = machines(settings.out, settings.used) or [machine_here(settings.device)]
        devices, torches = (" and ".join(dict.fromkeys(names)) for names in zip(*map(astuple, used), strict=True))
        found = commits(settings.out, settings.used) or [commit_here()]
        return cls(
            **asdict(made) | {"command": command, "device": devices, "torch": torches}, commit=" and ".join(found)
        )


@cache
def commit_here() -> str:
    """The commit of this checkout, "with changes" where its files differ from what was committed.

    In a copy that is not a checkout it is $NETMOMENTS_COMMIT, or `UNKNOWN`.
    """
    try:
        top, commit = _git("rev-parse", "--show-toplevel", "HEAD").stdout.split("\n")[:2]
        if Path(top).resolve() == ROOT:
            return commit if _git("diff", "--quiet", "HEAD").returncode == 0 else f"{commit} with changes"
    except (OSError, ValueError, subprocess.SubprocessError):
        pass
    return os.environ.get(COMMIT) or UNKNOWN


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=30, check=False)

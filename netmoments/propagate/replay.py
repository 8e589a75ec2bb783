"""Work on a GPU that comes again with tensors of the same shapes: recorded once, then replayed in one launch.

A sketch of one image is some thousand small steps, each over before the host has asked for the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]


@dataclass(eq=False)
class _Pool:
    """Memory that the recordings of a device share: they are replayed one after the other."""

    handle: Any = field(default_factory=torch.cuda.graph_pool_handle)
    used: torch.cuda.Event = field(default_factory=torch.cuda.Event)


_pools: WeakValueDictionary[torch.device, _Pool] = WeakValueDictionary()
"""Held by the recordings alone: with the last of them torch gives the memory up, and the handle is of no more use."""


@dataclass(eq=False)
class _Recording:
    """A recorded graph, and the tensors it reads and writes, which it owns."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    pool: _Pool

    @classmethod
    def of(cls, work: Work, inputs: tuple[Tensor, ...]) -> _Recording:
        """On a stream of its own, of the inputs' device; if it fails, the caller's stream is the current one again."""
        device = inputs[0].device
        before = torch.cuda.current_stream(device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        pool = _pools.setdefault(device, _Pool())
        random = torch.cuda.default_generators[device.index or 0]
        numbers = random.clone_state()
        with torch.inference_mode(False), torch.no_grad():  # else callers outside inference mode could not use it
            own = tuple(x.clone() for x in inputs)
            try:
                with torch.cuda.graph(graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"):
                    outputs = work(*own)
            except BaseException:
                _pools.pop(device, None)  # it may be spoilt
                random.graphsafe_set_state(numbers)  # else it takes itself to be in a recording for ever
                raise
            finally:
                torch.cuda.set_stream(before)
        return cls(graph, own, outputs, pool)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        stream = torch.cuda.current_stream(inputs[0].device)
        stream.wait_event(self.pool.used)  # of a caller on another stream
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
            own.record_stream(stream)
        self.graph.replay()
        found = tuple(x.clone() for x in self.outputs)
        self.pool.used.record(stream)
        return found


@dataclass(eq=False)
class _Shapes:
    """Work that was asked for with inputs of some shapes: its recording, or that there can be none."""

    recording: _Recording | None = None
    refused: bool = False
    done: bool = False
    """Whether the work was done once, by whichever thread: what it keeps for later must not be made in a recording."""

    def record(self, work: Work, inputs: tuple[Tensor, ...]) -> None:
        """Unless that was tried before."""
        if self.recording is None and not self.refused:
            try:
                self.recording = _Recording.of(work, inputs)
            except RuntimeError:  # something in it cannot be recorded
                self.refused = True


KEPT = 8
"""Shapes that are remembered: those of a batch's parts, and of its last; of samples and of their gradients."""

_lock = threading.Lock()


def _key(work: Work, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What is done, by its name, and to what."""
    done = getattr(work, "func", work)  # of a partial
    return (done.__module__, done.__qualname__, *((x.shape, x.dtype, x.device) for x in inputs))


def replayed(recordings: dict[Any, Any], work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
    """`work(*inputs)`, which must depend on nothing but these and the owner of `recordings`, and never make the host
    wait.

    It is done as it is the first time that inputs of these shapes come, recorded once that is over, and replayed from
    then on. A recording lives as long as its owner, or until others have come.
    """
    if torch.cuda.is_current_stream_capturing():
        return work(*inputs)
    key = _key(work, inputs)
    with _lock, torch.cuda.device_of(inputs[0]):
        found = recordings[key] = recordings.pop(key, None) or _Shapes()  # the latest last
        if len(recordings) > KEPT:
            del recordings[next(iter(recordings))]
        if found.done:
            found.record(work, inputs)
        if found.recording is not None:
            return found.recording.replay(inputs)
    result = work(*inputs)
    found.done = True
    return result


def recorded(recordings: dict[Any, Any], work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The same, but recorded as soon as it was done once: for work that comes again and again."""
    result = replayed(recordings, work, *inputs)
    if not torch.cuda.is_current_stream_capturing():
        with _lock, torch.cuda.device_of(inputs[0]):
            if (key := _key(work, inputs)) in recordings:
                recordings[key].record(work, inputs)
    return result

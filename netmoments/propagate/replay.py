"""Recording work on a GPU as a CUDA graph, and replaying it in one launch when it recurs with the same shapes.

A sketch of one image is some thousand small steps, each over before the host has asked for the next. `replayed` and
`recorded` are the two ways in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]
REPLAYED_BYTES = 4 * 2**30
"""Work that takes more memory than this (or an eighth of the device's) is not recorded: a recording keeps its memory,
and such work does not wait for launches anyway."""


@dataclass(eq=False)
class _Pool:
    """Memory that the recordings of a device share, which is possible because they are replayed one after the other."""

    handle: Any = field(default_factory=torch.cuda.graph_pool_handle)
    used: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    """When the latest replay is over."""


_pools: WeakValueDictionary[torch.device, _Pool] = WeakValueDictionary()
"""The pool of each device. Only its recordings hold it: with the last of them torch frees the memory, and the handle
cannot be used again."""


@dataclass(eq=False)
class _Recording:
    """A recorded graph, and the tensors it reads and writes, which it owns."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    pool: _Pool

    @classmethod
    def of(cls, work: Work, inputs: tuple[Tensor, ...]) -> _Recording:
        """Record work on a stream of its own; the caller's stream is current again after that, also after a failure."""
        device = inputs[0].device
        before = torch.cuda.current_stream(device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        pool = _pools.setdefault(device, _Pool())
        generator = torch.cuda.default_generators[device.index or 0]
        state = generator.clone_state()
        with torch.inference_mode(False), torch.no_grad():  # else callers outside inference mode could not use it
            copies = tuple(x.clone() for x in inputs)
            try:
                with torch.cuda.graph(graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"):
                    outputs = work(*copies)
            except BaseException:
                _pools.pop(device, None)  # it may be spoilt
                generator.graphsafe_set_state(state)  # else it would take itself to be in a recording for ever
                raise
            finally:
                torch.cuda.set_stream(before)
        return cls(graph, copies, outputs, pool)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs for other inputs of the same shapes, in tensors that the caller may keep."""
        stream = torch.cuda.current_stream(inputs[0].device)
        stream.wait_event(self.pool.used)  # a caller on another stream may still be using the pool
        for recorded_input, value in zip(self.inputs, inputs, strict=True):
            recorded_input.copy_(value)
            recorded_input.record_stream(stream)
        self.graph.replay()
        outputs = tuple(x.clone() for x in self.outputs)
        self.pool.used.record(stream)
        return outputs


@dataclass(eq=False)
class _Shapes:
    """What is known of work with inputs of certain shapes: its recording, if there is one yet."""

    recording: _Recording | None = None
    refused: bool = False
    """Whether recording was tried and failed."""
    done: bool = False
    """Whether some thread has done the work once: what it keeps for later must not be made in a recording."""

    def record(self, work: Work, inputs: tuple[Tensor, ...]) -> None:
        """Record the work, unless that was tried before."""
        if self.recording is None and not self.refused:
            try:
                self.recording = _Recording.of(work, inputs)
            except RuntimeError:  # something in it cannot be recorded
                self.refused = True


KEPT = 32
"""How many shapes an owner remembers. One call for 16 images has sampled in ten: in blocks of powers of two, for all
images and for the neediest of them."""

_lock = threading.Lock()


def _key(work: Work, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """The name of the function that does the work, with the shapes, dtypes and devices of its inputs."""
    function = getattr(work, "func", work)  # of a partial
    return (function.__module__, function.__qualname__, *((x.shape, x.dtype, x.device) for x in inputs))


def replayed(recordings: dict[Any, Any], work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
    """work(*inputs), from a recording when inputs of these shapes come for the second time and later.

    The work must depend on its inputs and the owner of `recordings` only, and never make the host wait. The first time
    it is done as it is, the second time it is recorded, and the recording is replayed from then on. A recording lives
    as long as its owner, or until `KEPT` other shapes have come since.
    """
    if torch.cuda.is_current_stream_capturing():
        return work(*inputs)
    key = _key(work, inputs)
    with _lock, torch.cuda.device_of(inputs[0]):
        known = recordings[key] = recordings.pop(key, None) or _Shapes()  # the latest last
        if len(recordings) > KEPT:
            del recordings[next(iter(recordings))]
        if known.done:
            known.record(work, inputs)
        if known.recording is not None:
            return known.recording.replay(inputs)
    result = work(*inputs)
    known.done = True
    return result


def recorded(recordings: dict[Any, Any], work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
    """As `replayed`, but the work is recorded right after it was done once: for work that is sure to recur."""
    result = replayed(recordings, work, *inputs)
    if not torch.cuda.is_current_stream_capturing():
        with _lock, torch.cuda.device_of(inputs[0]):
            if (key := _key(work, inputs)) in recordings:
                recordings[key].record(work, inputs)
    return result

"""Work on a GPU that comes again with tensors of the same shapes: recorded once, then replayed in one launch.

A sketch of one image is some thousand small steps, each over before the host has asked for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]


@dataclass(eq=False)
class _Recording:
    """A recorded graph, and the tensors it reads and writes, which it owns."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    used: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    @classmethod
    def of(cls, work: Work, inputs: tuple[Tensor, ...]) -> _Recording:
        own = tuple(x.clone() for x in inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = work(*own)
        return cls(graph, own, outputs)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        stream = torch.cuda.current_stream(inputs[0].device)
        stream.wait_event(self.used)  # of a caller on another stream
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        found = tuple(x.clone() for x in self.outputs)
        self.used.record(stream)
        return found


@dataclass(eq=False)
class _History:
    """What an owner's work was last asked for, and the recording of it; None if there is none, or can be none."""

    key: Any = None
    recording: _Recording | None = None
    refused: bool = False


_lock = threading.Lock()
_histories: WeakKeyDictionary[Any, _History] = WeakKeyDictionary()


def replayed(owner: Any, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
    """`work(*inputs)`, which must depend on nothing but these and `owner`, and never make the host wait.

    It is done as it is the first time that inputs of these shapes come in a row, recorded the second time, and replayed
    from then on. A recording lives as long as its owner, or until other shapes come.
    """
    if torch.cuda.is_current_stream_capturing():
        return work(*inputs)
    key = tuple((x.shape, x.dtype, x.device) for x in inputs)
    with _lock, torch.cuda.device_of(inputs[0]):
        history = _histories.setdefault(owner, _History())
        if history.key != key:
            history.key, history.recording, history.refused = key, None, False
        elif history.recording is None and not history.refused:
            try:
                history.recording = _Recording.of(work, inputs)
            except RuntimeError:  # something in it cannot be recorded
                history.refused = True
        if history.recording is not None:
            return history.recording.replay(inputs)
    return work(*inputs)

"""CUDA graphs: work is run in a stream of its own, then recorded there, to be replayed.

Not the other way round: compiling, choosing algorithms and allocating cannot be recorded, and
happen in the first runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@contextmanager
def beside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Queue what is called inside the block in `stream`: after what was queued before the block,
    and before what is queued after it."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(stream.device).wait_stream(stream)


def record(
    work: Callable[[], Result], stream: torch.cuda.Stream, memory: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what `work` does, and what it returns: tensors that every replay writes anew.
    Graphs that are never replayed at once may share their `memory`, a pool of torch's."""
    graph = torch.cuda.CUDAGraph()
    mode = "thread_local"  # other threads may be at work on the device
    with torch.cuda.graph(graph, memory, stream, capture_error_mode=mode):
        result = work()
    return graph, result

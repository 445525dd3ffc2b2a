"""Captures of CUDA graphs in tests, which earlier tests of the same process can't spoil."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """As torch.cuda.graph, without Python's garbage collector: a decoder of an earlier test whose graphs it freed now would
    end the capture.
    """
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        gc.enable()

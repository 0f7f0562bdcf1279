"""Timing on a GPU: interleaved replays of CUDA graphs, and the copy bandwidth they are held to."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]
LEAST_CALLS = 24  # in one graph, so that its launch is no part of the time


class Replay:
    """Calls captured in one CUDA graph, to be replayed and timed.

    Args:
        calls: the same work on different data, larger together than the cache, so that every
            call finds its data in memory, as a layer of a model does.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compiles, and fills the allocator
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.rounds = max(1, LEAST_CALLS // len(calls))
        self.num_calls = self.rounds * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(self.rounds):
                for call in calls:
                    call()
        self.graph.replay()
        torch.cuda.synchronize()

    def microseconds(self) -> float:
        """Time of one call in one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.num_calls


def interleaved(replays: Mapping[str, Replay], repeats: int) -> dict[str, list[float]]:
    """Microseconds per call of each replay, ``repeats`` times, one after the other in turn."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(repeats):
        for name, replay in replays.items():
            times[name].append(replay.microseconds())
    return times


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return statistics.median(times), cuts[1], cuts[7]


def copy_bandwidth(num_bytes: int = 2**31, repeats: int = 11) -> float:
    """Bytes per second of a device-to-device copy, counting bytes read and bytes written.

    Launched one by one: in a graph a copy is a node of its own kind, which was seen to be slower.
    """
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats + 2):  # the first two warm up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return 2 * num_bytes / percentiles(times[2:])[0] * 1e6


def count_launches(call: Call) -> int | None:
    """Kernels that one call launches; None where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")  # one cycle is all
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
    kernels = [
        event
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name
    ]
    return len(kernels) or None

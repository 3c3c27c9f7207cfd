"""Measure the peak memory of PyTorch's CPU allocator."""

from collections.abc import Callable


def peak_memory(work: Callable[[], object]) -> int:
    """Return the largest number of bytes that `work` has allocated at a time."""
    from torch.profiler import ProfilerActivity, profile

    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    live = peak = 0
    events = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak

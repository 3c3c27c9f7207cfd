"""The most memory that PyTorch's CPU allocator held at a time."""

from collections.abc import Callable


def peak_memory(work: Callable[[], object]) -> int:
    """The most bytes that `work` held at a time, beyond what was there before."""
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

"""`stage count`: noisy class counts, for denominators and label priors."""

from __future__ import annotations

from sfumato.queries.count import public_counts, query_count, save_counts
from sfumato.settings.queries import Count
from stages.runner import QueryRun


def count(run: QueryRun[Count]) -> None:
    charge = run.open_charge("class counts", "1: an image is in one class", 1.0)
    noisy = query_count(charge, len(run.plan.classes))
    counts = public_counts(noisy, charge.noise_multiplier)
    with run.releasing(charge) as directory:
        save_counts(counts, noisy, directory)

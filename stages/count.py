"""`stage count`: release noisy class counts, for denominators and label priors."""

from sfumato.queries.count import public_counts, public_several, query_count, query_several, save_counts, several_bound
from sfumato.settings.queries import Count
from stages.runner import QueryRun


def count(run: QueryRun, settings: Count) -> None:
    classes = len(run.plan.classes)
    if run.plan.several:
        released = "counts of labels, of images, and of labels over the root of their number"
        sensitivity = f"√{classes + 2}: an image with all {classes} labels"
        charge = run.open_charge(released, sensitivity, several_bound(classes))
        noisy = query_several(charge, classes)
        counts = public_several(noisy, charge.noise_multiplier)
    else:
        charge = run.open_charge("class counts", "1: an image is in one class", 1.0)
        noisy = query_count(charge, classes)
        counts = public_counts(noisy, charge.noise_multiplier)
    with run.releasing(charge) as directory:
        save_counts(counts, noisy, directory)

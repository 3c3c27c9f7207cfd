"""Noisy gradients of weight matrices over all sensitive images, and a ranking of the matrices.

The matrices are called candidates. One Gaussian covers all of them, because their gradients are
clipped jointly. Norms and ranks are post-processing, so they are free.

Source: DP-SAPF Algorithm 1.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from sfumato.dpsgd.clip import unflatten
from sfumato.dpsgd.run import Gradients, gradient_sum
from sfumato.errors import DataError, explained
from sfumato.privacy.charge import Charge
from sfumato.storage.artifacts import Artifact
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_csv, write_json


def query_saliency(charge: Charge, gradients: Gradients) -> dict[str, Tensor]:
    """Release the noisy sum of clipped gradients of the denoising loss, divided by a public size.

    Each image's gradient is the mean over its draws of noise level and noise, clipped over all
    candidates jointly. The candidates are the parameters of `gradients`. The public size is
    `gradients.public_batch`, here N̄, the public number of images, because all images are drawn.

    Returns one noisy vector per candidate, (size,) float64, on the CPU.

    Guarantee: adding or removing one image changes the sum, over all candidates together, by at
    most `max_norm` in L2.
    """
    total = gradient_sum(gradients, charge).cpu()
    released = charge.release(total, max_norm=gradients.max_norm).double() / gradients.public_batch
    return {
        name: part.flatten() for name, part in unflatten(released, gradients.parameters).items()
    }


def rank_candidates(released: Mapping[str, Tensor], noise_std: float) -> pd.DataFrame:
    """Compute norms and ranks of the released vectors. The table has one row per candidate, in the
    order of `released`.

    Noise adds size·noise_std² to the expected squared norm, so a large candidate without any signal
    would rank above a small one with a signal. The column "debiased" is the squared norm minus
    size·noise_std²: an unbiased estimate of the squared norm without noise, which may be negative.
    This estimate still grows with the size of a candidate, because gradients of larger
    matrices have larger norms. "rank" sorts by "debiased", and "raw_rank" by "raw_norm". Rank 1 is
    the most salient.

    noise_std: public standard deviation of each entry's noise, σ·max_norm/N̄.

    Source: DP-SAPF Eq. 8 and Algorithm 1 for the raw norm.
    """
    norms = [float(torch.linalg.vector_norm(vector.double())) for vector in released.values()]
    table = pd.DataFrame(
        {"name": list(released), "size": list(map(len, released.values())), "raw_norm": norms}
    )
    table["debiased"] = table["raw_norm"] ** 2 - table["size"] * noise_std**2
    for rank, score in (("rank", "debiased"), ("raw_rank", "raw_norm")):
        table[rank] = table[score].rank(method="first", ascending=False).astype(int)
    return table


def save_ranking(table: pd.DataFrame, noise_std: float, directory: Path) -> None:
    """Write the table, and the candidates in two orders: sorted by "rank" and by "raw_rank"."""
    columns = {
        "matrix": "",
        "size": "",
        "raw_norm": ".6g",
        "debiased": ".6g",
        "rank": "",
        "raw_rank": "",
    }
    rows: list[Any] = table.assign(matrix=table["name"].str.removesuffix(".weight")).to_dict(
        "records"
    )
    write_csv(directory / "saliency.csv", rows, columns)
    orders = {"debiased": table.sort_values("rank"), "raw": table.sort_values("raw_rank")}
    ranked = {key: [[name] for name in order["name"]] for key, order in orders.items()}
    content = {"candidates": "qkv", "score": "gradient", "noise_std": noise_std, "ranked": ranked}
    write_json(directory / "saliency.json", content)


def read_ranking(saliency: Artifact | None) -> list[str] | None:
    """Read the candidates, the most salient first. Return None if `saliency` is None or off."""
    if saliency is None or not saliency.enabled:
        return None
    file = saliency.path / "saliency.json"
    with explained(
        DataError, lambda error: f"{file} cannot be read ({error}): run `stage saliency` again"
    ):
        return [str(name) for (name,) in read_json(file)["ranked"]["debiased"]]

"""A kill during Private Evolution costs nothing: released rounds are kept, and paid for once."""

import json

import numpy as np
from safetensors.numpy import load_file
from small_repository import make_repository

ROUNDS = 5
PE = {
    "recipe": "pe",
    "run": ["count", "evolve", "synthesize"],
    "evolve": {"rounds": ROUNDS, "population": 124, "images": 300},
    "synthesize": {"count": 200},
}


def test_a_kill_in_round_three_of_five_costs_nothing(tmp_path):
    repository = make_repository(tmp_path)
    repository.edit(**PE)
    for command in ("prepare sensitive", "prepare public", "plan", "count", "classifier"):
        repository.stage(command)

    def durable() -> int:
        return max(
            [0, *(entry["uses"] for entry in repository.journal() if entry["kind"] == "progress")]
        )

    # Kill the run when at least two rounds are durable, but not all
    repository.kill("evolve", lambda: durable() >= 2)
    assert durable() < ROUNDS
    opened = [entry for entry in repository.journal() if entry["kind"] == "open"][-1]
    assert not (repository.path / "artifacts/evolve").exists()

    # A checkpoint contains a population of public candidates, but no votes, noisy or not
    run = repository.path / "state/runs" / opened["record"]["id"]
    left = [load_file(path) for path in run.glob("checkpoint-*.safetensors")]
    assert 1 <= len(left) <= 2  # a kill may leave an older checkpoint
    assert all(sorted(population) == ["genes", "kinds", "labels"] for population in left)

    # The run resumes, and all rounds are charged once
    repository.stage("evolve", "resuming run", "no further cost")
    assert repository.opened() == ["count", "evolve"]
    assert not list(run.glob("checkpoint-*"))
    records = json.loads((repository.path / "artifacts/evolve/privacy.json").read_text())["records"]
    (mine,) = (record for record in records.values() if record["stage"] == "evolve")
    assert mine["event"] == opened["record"]["event"] and str(ROUNDS) in json.dumps(mine["event"])
    log = (repository.path / "artifacts/evolve/log.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in log[1:]] == list(range(1, ROUNDS + 1))

    # The release is drawn from the population
    for name in ("auxiliary", "refine", "select", "pretrain", "finetune", "teacher"):
        repository.run("stage", name)
    repository.stage("synthesize")
    found, known = (
        np.load(repository.path / "artifacts" / name / "images.npy").reshape(-1, 64)
        for name in ("synthesize", "evolve")
    )
    assert len(found) == 200 and {row.tobytes() for row in found} <= {
        row.tobytes() for row in known
    }

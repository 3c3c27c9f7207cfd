"""`stage classifier`: a network that names images, trained on the public set alone."""

from __future__ import annotations

import json

from stages.common import ARTIFACTS, PUBLIC, Config, DryRun, Out, PublicPath, describe, load_plan, progress


def classifier(config: Config = None, out: Out = None, public: PublicPath = PUBLIC, dry_run: DryRun = False) -> None:
    """Free: train a residual network to tell the public classes apart."""
    plan, out = load_plan("classifier", config), out or ARTIFACTS / "classifier"
    if dry_run:
        return describe(plan, {"public": public}, out)
    from sfumato.artifacts import check_out, read_artifact, write_empty, writing

    if not plan.enabled:
        return write_empty(out, "classifier")
    import typer

    from sfumato.compute import settle_processor
    from sfumato.data.store import load_public, read_public_card
    from sfumato.features.public_network import save_resnet
    from sfumato.warmup.public_classifier import train_public_classifier

    check_out(out, "classifier")
    settle_processor()
    inputs = [read_artifact(public, "public")]
    images = load_public(public, plan.shape)
    with progress("classifier") as report:
        model, accuracy = train_public_classifier(images, plan.settings, plan.seed, report)
    typer.echo(
        f"classifier: {100 * accuracy:.1f} % of the public images kept for validation are named right, of {len(images.classes)} classes",
        err=True,
    )
    with writing(out, "classifier", inputs) as directory:
        save_resnet(model, directory)
        content = {
            "public_validation_accuracy": round(accuracy, 4),
            "classes": images.classes,
            "source": read_public_card(public / "card.json").source,
        }
        (directory / "card.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

"""An entry for the Differential Privacy Deployments Registry, from the release and the ledger alone.

Source: https://github.com/opendp/deployments-registry-data, schemas/deployments-schema.yaml. The models below state the
part of that schema that is used here: required fields, closed lists, no other keys. The registry asks for things that
only the owner knows; without them there is no entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sfumato.settings.release import Publisher, Sector

ASKED = ("owner", "owner_type", "purpose", "region")  # what the schema requires and a ledger cannot say
Text = Annotated[str, Field(min_length=1)]
Day = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Curator(Part):
    data_curator_name: Text
    data_curator_type: Publisher


class Basic(Part):
    name: Text
    data_curators: Annotated[list[Curator], Field(min_length=1)]
    description: Text
    intended_use: Text
    data_product_type: Literal["Dataset", "Synthetic data"]
    data_product_region: Text
    data_product_sector: Sector | None = None
    publication_date: Day


class Variant(Part):
    variant_name: Literal["Approximate DP"] = "Approximate DP"
    data_domain: Text
    unprotected_quantities: Text


class Parameters(Part):
    epsilon: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]


class PrivacyLoss(Part):
    privacy_unit: Text
    privacy_unit_details: Text
    number_of_privacy_units: Annotated[int, Field(gt=0)]
    privacy_parameters: Parameters
    privacy_parameters_details: Text


class Deployed(Part):
    model_name: Literal["Central"] = "Central"
    trust_assumptions: Text
    release_type: Literal["One release"] = "One release"
    release_type_details: Text
    data_source_type: Literal["Static"] = "Static"
    access_type: Literal["Non-interactive"] = "Non-interactive"


class Implementation(Part):
    preprocessing_and_hyperparameter_tuning: Text
    mechanisms: Text
    composition: Text
    post_processing: Text
    additional_information: Text


class Administrative(Part):
    status: Literal["Draft"] = "Draft"
    registry_authors: Annotated[list[Text], Field(min_length=1)]
    tier: Literal[3] = 3


class Deployment(Part):
    basic: Basic
    dp_variant: Variant
    privacy_loss: PrivacyLoss
    deployment_model: Deployed
    implementation: Implementation
    administrative: Administrative


class Entry(Part):
    url_slug: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    deployment: Deployment


def registry_entry(facts: Mapping[str, Any]) -> Entry:
    """The entry, a draft for the owner to read over. facts: of `sfumato.release.statements.facts_of`.

    Raises KeyError where the owner has not said one of ASKED.
    """
    about, dataset = facts["about"], facts["dataset"]
    mechanisms = "\n".join(
        f"- {row['stage']}: {row['released']}. {row['mechanism']}; sensitivity {row['sensitivity']}."
        for row in facts["charges"]
    )
    return Entry(
        url_slug=re.sub(r"[^a-z0-9]+", "-", f"{about['owner']} {dataset} {facts['day'][:4]}".lower()).strip("-"),
        deployment=Deployment(
            basic=Basic(
                name=f"{dataset}: differentially private images",
                data_curators=[Curator(data_curator_name=about["owner"], data_curator_type=about["owner_type"])],
                description=facts["description"],
                intended_use=about["purpose"],
                data_product_type="Dataset" if facts["public_images"] else "Synthetic data",
                data_product_region=about["region"],
                data_product_sector=about.get("sector"),
                publication_date=facts["day"],
            ),
            dp_variant=Variant(
                data_domain=f"Sets of labelled images in {facts['class_count']} classes whose names are public.",
                unprotected_quantities="; ".join(facts["public"]) + ".",
            ),
            privacy_loss=PrivacyLoss(
                privacy_unit=facts["unit"],
                privacy_unit_details=f"Adjacent sets: {facts['neighbours']}.",
                number_of_privacy_units=facts["size_hint"],
                privacy_parameters=Parameters(epsilon=facts["epsilon"], delta=facts["delta"]),
                privacy_parameters_details=f"{facts['accounting']} {facts['all_time']}",
            ),
            deployment_model=Deployed(trust_assumptions=facts["trust"], release_type_details=facts["all_time"]),
            implementation=Implementation(
                preprocessing_and_hyperparameter_tuning="Each image is cropped, resized and assigned to the set or to "
                "the hold-out by itself, whatever the others are. No setting was fitted to the sensitive images "
                "outside the mechanisms; choices made by looking at numbers from real images are not accounted for.",
                mechanisms=f"{mechanisms}\n- Software: sfumato {facts['version']}. Noise is drawn from AES in counter "
                "mode, keyed by the operating system, added in double precision and rounded to a public grid; whole "
                "totals get discrete Gaussian noise.",
                composition=facts["accounting"],
                post_processing="Models were fitted to the noisy releases, and the images drawn from the models.",
                additional_information="ledger.json holds every mechanism: ε can be recomputed from it alone.",
            ),
            administrative=Administrative(registry_authors=[about["owner"]]),
        ),
    )

"""Machine-readable statements about a release, written beside the public report.

The statements depend only on the release and the ledger. Their forms are in `statements.yaml`. This
file is parsed before facts are filled in, so that no text of the owner can change the structure.
"""

import re
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

import yaml

from sfumato.privacy.accountant import round_up
from sfumato.privacy.events import Mechanism
from sfumato.privacy.profile import bound_text
from sfumato.release.card import LABEL_TABLE, data_dictionary
from sfumato.release.card_check import ReleaseCard
from sfumato.release.exports import PARQUET
from sfumato.release.report import (
    Facts,
    checked_release,
    day_of,
    not_covered,
    what_it_cost,
    what_was_released,
    who_is_trusted,
)
from sfumato.settings.recipes import as_yaml
from sfumato.storage.artifacts import PRIVACY, Artifact
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json

CROISSANT = "croissant.json"
REGISTRY = "deployment.yaml"
CATALOGUE = "healthdcat.jsonld"
TURTLE = "healthdcat.ttl"
# For each file, the settings in section `release` that the owner must provide for the file to be
# written
NEEDS = {
    REGISTRY: ("owner", "owner_type", "purpose", "region"),
    TURTLE: (
        "owner",
        "contact",
        "purpose",
        "legal_basis",
        "url",
        "health_category",
        "access_body",
        "access_url",
    ),
}
E_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
FORMS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


def write_statements(release: Path, ledger: Path, directory: Path) -> dict[str, list[str]]:
    """Write records for data catalogues and an entry for the deployments registry into `directory`.

    If the ledger contains no charge, nothing is written. Returns the settings that the owner has
    not provided yet, by the file that needs them. Settings for the health catalogue are returned
    only if `release.health_category` is set. Raises the errors of
    `sfumato.release.report.checked_release`.

    Guarantee: the statements depend only on the files of `release` and `ledger`, which are already
    released.
    """
    artifact, content, epsilon = checked_release(release, ledger)
    if not content["records"]:
        return {}
    facts = facts_of(artifact, content, epsilon)
    files = read_json(artifact.path / PRIVACY)["files"] | {
        PRIVACY: digest_of_file(artifact.path / PRIVACY)
    }
    record = croissant_record(facts, files, release.name)
    write_json(directory / CROISSANT, record, ensure_ascii=False)
    missing = {
        name: [f"release.{key}" for key in keys if key not in facts] for name, keys in NEEDS.items()
    }
    if not missing[REGISTRY]:
        (directory / REGISTRY).write_text(
            as_yaml(fill_form(FORMS["registry"], facts)), encoding="utf-8"
        )
    if not missing[TURTLE]:
        write_catalogue(
            directory, facts | catalogue_facts(facts, read_json(artifact.path / "card.json"), files)
        )
    if "health_category" not in facts:  # no entry for a health catalogue was requested
        missing[TURTLE] = []
    return {name: keys for name, keys in missing.items() if keys}


def croissant_record(facts: Facts, files: Mapping[str, str], folder: str) -> dict[str, Any]:
    """Return the Croissant record of a release.

    files: SHA-256 of each file; folder: name of the release's folder.
    """
    # Default: path of the release, relative to the report
    base = facts.get("url", f"../{folder}").rstrip("/")
    default_format = "application/octet-stream"
    distribution = [
        {
            "name": name,
            "sha256": sha256,
            "base": base,
            "format": FORMS["formats"].get(PurePath(name).suffix, default_format),
        }
        for name, sha256 in sorted(files.items())
        # A picture's name can contain a class name with a space, which is not valid in an @id
        if not name.startswith(("png/", "classes/"))
    ]
    record = fill_form(
        FORMS["croissant"],
        facts | {"distribution": [fill_form(FORMS["file"], file) for file in distribution]},
    )
    # The form `table` describes a single column of labels, so it does not fit several labels
    if PARQUET in files and LABEL_TABLE not in files:
        record["recordSet"].append(fill_form(FORMS["table"], {"parquet": PARQUET}))
    return record


def write_catalogue(directory: Path, facts: Facts) -> None:
    """Write the release's entry for health data catalogues, as JSON-LD and as Turtle."""
    from rdflib import Graph  # takes half a second

    write_json(directory / CATALOGUE, fill_form(FORMS["healthdcat"], facts), ensure_ascii=False)
    Graph().parse(directory / CATALOGUE).serialize(
        directory / TURTLE, format="turtle", encoding="utf-8"
    )


def catalogue_facts(facts: Facts, card: ReleaseCard, files: Collection[str]) -> Facts:
    """Collect further facts, for the entry in health data catalogues.

    Web addresses are percent-encoded, so that each is a valid IRI.
    """
    web = {key: quote(facts[key], safe=":/?#@!$&'()*+,;=%~") for key in ("url", "access_url")}
    columns = {
        name: {"meaning": f"{meaning}: {values}", "type": kind}
        for name, (meaning, kind, values) in data_dictionary(card, LABEL_TABLE in files).items()
    }
    size = {"@type": "xsd:nonNegativeInteger", "@value": str(facts["size_hint"])}
    catalogue = {
        **web,
        "holder": facts.get("controller", facts["owner"]),
        ("records", "individuals")[facts["grouped"]]: size,
        "columns": [
            fill_form(
                FORMS["column"],
                {"column": f"{web['url']}#column-{number:03d}", "name": name} | column,
            )
            for number, (name, column) in enumerate(columns.items(), 1)
        ],
    }
    if mail := E_MAIL.search(facts["contact"]):
        catalogue |= {"e-mail": mail[0], "mailto": {"@id": f"mailto:{quote(mail[0], safe='@')}"}}
    return catalogue


def fill_form(form: Any, facts: Mapping[str, object]) -> Any:
    """Return a copy of a form, with facts filled in.

    Inside a text, "{name}" is replaced by the fact's text. A text "=name" is replaced by the fact
    itself, which need not be a text. If this fact is missing, the key with this text is left out.
    """
    if isinstance(form, dict):
        parts = {key: fill_form(value, facts) for key, value in form.items()}
        return {key: value for key, value in parts.items() if value is not None}
    if isinstance(form, list):
        return [fill_form(value, facts) for value in form]
    if not isinstance(form, str):
        return form
    if form.startswith("="):
        return facts.get(form[1:])
    return form.format_map(facts)


def facts_of(artifact: Artifact, ledger: Mapping, epsilon: float) -> Facts:
    """Collect the facts for all statements, including the owner's texts.

    The keys of the result are the names that the forms use. epsilon: ε of the release.
    """
    card = read_json(artifact.path / "card.json")
    release_facts = what_was_released(artifact)
    cost = what_it_cost(ledger, epsilon)
    owner_texts = release_facts["about"]
    day = max(day_of(record) for record in ledger["records"])
    publisher = owner_texts.get("owner", "Its owner")
    creator = {"@type": "sc:Organization", "name": publisher}
    if mail := E_MAIL.search(owner_texts.get("contact", "")):
        creator["email"] = mail[0]
    public = [
        "the fact that the set exists",
        "its class names and the shape of its images",
        "all settings",
    ]
    if cost["declared"]:
        units = "persons" if cost["grouped"] else "images"
        public.append(f"the number of {units}, which the owner declared to be public")
    gaps = [f"The guarantee does not cover {gap}." for gap in not_covered(cost["grouped"])]
    facts = owner_texts | release_facts | cost
    facts |= {
        "day": day,
        "digest": ledger["digest"],
        "version": version("sfumato"),
        "publisher": publisher,
        "creator": creator if "owner" in owner_texts else None,
        "slug": (
            re.sub(r"[^a-z0-9]+", "-", f"{publisher} {cost['dataset']} {day[:4]}".lower()).strip(
                "-"
            )
        ),
        "class_names": [
            {"classes/label": i, "classes/name": name} for i, name in enumerate(card["classes"])
        ],
        "limitations": [
            "Made to train classifiers; images and labels were not checked by hand.",
            *gaps,
        ],
        "use_cases": [owner_texts["purpose"]] if "purpose" in owner_texts else None,
        "queries": ", ".join(row["stage"] for row in cost["stages"]),
        "epsilon": round_up(epsilon, 4),
        "delta": ledger["delta"],
        "size_hint": ledger["size_hint"],
        "target": ledger["target"],
        "stated_epsilon": cost["epsilon"],
        "stated_delta": cost["delta"],
        "methods": ", ".join(f"{value} ({name})" for name, value in cost["accountants"]),
        "charges": len(ledger["records"]),
        "opened": ledger["odometer"]["charges"],
        "opened_epsilon": bound_text(ledger["odometer"]["epsilon"]),
        "trust": " ".join(who_is_trusted(bool(cost["owners"]))),
        "public": "; ".join(public) + ".",
        "mechanisms": "\n".join(map(mechanism_line, ledger["records"])),
    }
    cases = {
        "licensed": "licence" in owner_texts,
        "only public": release_facts["only_public"],
        "by teacher": card.get("labels") == "teacher" or release_facts["only_public"],
        "all charges known": ledger["odometer"]["complete"],
        "several owners": bool(cost["owners"]),
    }
    for case, holds in cases.items():  # a case may use facts of earlier cases
        facts |= fill_form(FORMS["cases"][case][holds], facts)
    return facts | fill_form(FORMS["texts"], facts)


def mechanism_line(record: Mapping) -> str:
    mechanism = Mechanism.from_json(record["event"])
    noise = (
        f"noise multiplier {mechanism.noise_multiplier:g}, sample rate "
        f"{mechanism.sample_rate:.4g}, releases {mechanism.uses}"
    )
    return (
        f"- {record['stage']}: {record['released']}. Gaussian, {noise}; sensitivity "
        f"{record['sensitivity']}."
    )

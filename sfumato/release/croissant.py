"""The release as a Croissant 1.1 record with RAI fields: what dataset catalogues read.

Sources: http://mlcommons.org/croissant/1.1, http://mlcommons.org/croissant/RAI/1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from sfumato.release.exports import PARQUET

SPECIFICATIONS = ["http://mlcommons.org/croissant/1.1", "http://mlcommons.org/croissant/RAI/1.0"]
TERMS = (  # names that Croissant adds to those of schema.org
    "arrayShape citeAs column containedIn equivalentProperty extract field fileProperty fileObject fileSet format "
    "includes isArray isLiveDataset jsonPath key md5 parentField path recordSet references regex repeated replace "
    "samplingRate separator source subField transform"
)
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in TERMS.split()},
}
FORMATS = {
    ".npy": "application/x-npy",
    ".npz": "application/x-npz",
    ".png": "image/png",
    ".json": "application/json",
    ".md": "text/markdown",
    ".csv": "text/csv",
    ".parquet": "application/x-parquet",
}


def croissant(facts: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The record as JSON-LD. facts: of `sfumato.release.statements.facts_of`.

    folder: of the release, as this file names it; where the owner says at which address it is published, that address.
    """
    about = facts["about"]
    base = about.get("url", folder).rstrip("/")
    files = {name: sha256 for name, sha256 in facts["files"].items() if not name.startswith("png/")}
    record: dict[str, Any] = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": SPECIFICATIONS,
        "name": facts["dataset"],
        "description": f"{facts['description']} {facts['guarantee']}",
        "version": "1.0.0",
        "datePublished": facts["day"],
        "license": about.get("licence", "other"),
        "citeAs": f"{about.get('owner', 'Its owner')}: {facts['dataset']}, {facts['day'][:4]}, ledger "
        f"{facts['digest'][:16]}",
        "keywords": ["differential privacy", *([] if facts["public_images"] else ["synthetic data"])],
        "distribution": [file_object(name, sha256, base) for name, sha256 in sorted(files.items())],
        "recordSet": record_sets(facts),
        "rai:dataCollection": f"No sensitive image is part of the set. It consists of {facts['kind']}. "
        f"{facts['measured']}",
        "rai:dataCollectionType": ["Software Collection" if facts["public_images"] else "Synthetic data generation"],
        "rai:dataAnnotationProtocol": [facts["labels"]],
        "rai:dataLimitations": ["Made to train classifiers; nobody checked images or labels by hand.", *facts["gaps"]],
        "rai:dataBiases": ["Rare classes and unusual images are represented worst: the noise hides them first."],
        "rai:personalSensitiveInformation": [facts["guarantee"], facts["trust"]],
        "rai:dataReleaseMaintenancePlan": facts["all_time"],
    }
    if "purpose" in about:
        record["rai:dataUseCases"] = [about["purpose"]]
    if "owner" in about:
        creator = {"@type": "sc:Organization", "name": about["owner"]}
        record["creator"] = creator | ({"email": about["contact"]} if "@" in about.get("contact", "") else {})
    if "url" in about:
        record["url"] = about["url"]
    return record


def file_object(name: str, sha256: str, base: str) -> dict[str, Any]:
    form = FORMATS.get(PurePath(name).suffix, "application/octet-stream")
    return part("FileObject", name, contentUrl=f"{base}/{name}", encodingFormat=form, sha256=sha256)


def record_sets(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The names of the classes; and, where there is a table of the images, its columns."""
    names = [{"classes/label": label, "classes/name": name} for label, name in enumerate(facts["classes"])]
    fields = [field("classes/label", "sc:Integer"), field("classes/name", "sc:Text")]
    found = [part("RecordSet", "classes", key={"@id": "classes/label"}, field=fields, data=names)]
    if PARQUET in facts["files"]:
        image = {"fileObject": {"@id": PARQUET}, "extract": {"column": "image"}, "transform": {"jsonPath": "bytes"}}
        label = {"fileObject": {"@id": PARQUET}, "extract": {"column": "label"}}
        fields = [
            field("images/image", "sc:ImageObject", source=image),
            field("images/label", "sc:Integer", source=label, references={"field": {"@id": "classes/label"}}),
        ]
        found.append(part("RecordSet", "images", field=fields))
    return found


def field(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return part("Field", name, dataType=kind, **more)


def part(kind: str, name: str, **more: Any) -> dict[str, Any]:
    """A part of the record, which other parts name by its "@id"."""
    return {"@type": f"cr:{kind}", "@id": name, "name": name, **more}

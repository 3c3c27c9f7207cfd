"""The statements beside the report are valid: Croissant's own validator checks the first, a JSON
Schema checks the registry's entry, and SHACL shapes check the catalogue's entry.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import mlcroissant
import numpy as np
import pytest
import yaml
from jsonschema import Draft202012Validator
from pyshacl import validate
from rdflib import DCAT, DCTERMS, FOAF, RDF, SH, SKOS, Graph, Literal, URIRef
from rdflib.compare import isomorphic
from small_release import RECORD, write_release

from sfumato.errors import BudgetError
from sfumato.privacy.accountant import default_delta
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.release.report import report_page
from sfumato.release.statements import CATALOGUE, CROISSANT, REGISTRY, TURTLE, write_statements
from sfumato.storage.digest import digest_of_file
from sfumato.storage.records import Records

SAID = {
    "owner": "The clinic",
    "owner_type": "Nonprofit",
    "purpose": "Teaching.",
    "region": "Europe",
}
SAID |= {"contact": "data@example.org", "licence": "cc-by-4.0"}
HEALTH = {
    **SAID,
    "legal_basis": "GDPR, Article 9(2)(j)",
    "url": "https://example.org/set",
    "health_category": "EHRS",
}
HEALTH |= {"access_body": "The access body", "access_url": "https://access.example.org"}
HEALTH_TERMS = "http://healthdataportal.eu/ns/health#"
RECOMMENDED = {  # the shapes do not require these
    *(
        DCTERMS.publisher,
        URIRef("http://www.w3.org/ns/adms#sample"),
        URIRef("http://data.europa.eu/930/custodian"),
    ),
    *(URIRef(f"https://w3id.org/dpv#{name}") for name in ("hasPurpose", "hasLegalBasis")),
    URIRef(f"{HEALTH_TERMS}numberOfRecords"),
}
PUBLISHED = Path(__file__).with_name("published")


@pytest.fixture
def states(digits, tmp_path):
    """Return a function that writes a release, its ledger and their statements. It returns the
    settings that the owner has not provided, and the folder of the statements.
    """

    def make(about=SAID, images=digits, **more):
        shutil.rmtree(tmp_path / "artifacts", ignore_errors=True)
        release = tmp_path / "artifacts" / "synthesize"
        ledger = tmp_path / "ledger.json"
        write_release(release, images, about=about, **more)
        budget = {
            "recipe": "r",
            "accountant": "rdp",
            "delta": default_delta(1500),
            "size_hint": 1500,
            "target": 1.0,
        }
        ledger.write_text(ledger_text(build_ledger(budget, Records.of([dict(RECORD)]), [])))
        (folder := tmp_path / "artifacts" / "report").mkdir()
        return write_statements(release, ledger, folder), folder

    return make


@pytest.mark.parametrize("sources", [("finetune",), ("select",)])
@pytest.mark.parametrize("export", [(), ("parquet", "png", "npz")])
@pytest.mark.parametrize("about", [{}, SAID, {**SAID, "url": "https://example.org/set"}])
def test_croissant_s_own_validator_finds_no_error(states, sources, export, about):
    _, folder = states(about, sources=sources, export=list(export))
    dataset = mlcroissant.Dataset(str(folder / CROISSANT))
    assert str(dataset.metadata.ctx.conforms_to.value).endswith("croissant/1.1")
    assert not dataset.metadata.ctx.issues.errors
    assert "ε = 0.6792" in dataset.metadata.personal_sensitive_information[0]
    assert len(list(dataset.records("classes"))) == 10


def test_croissant_is_valid_if_class_names_contain_spaces(digits, states):
    names = ("no finding", *(f"Pleura\u202f{i}" for i in range(9)))
    _, folder = states(images=replace(digits, classes=names), export=["parquet", "png"])
    dataset = mlcroissant.Dataset(str(folder / CROISSANT))
    assert not dataset.metadata.ctx.issues.errors
    assert [row["classes/name"] for row in dataset.records("classes")] == list(names)


@pytest.mark.parametrize(
    "contact", ["Ann Lee <data@example.org>, tel. 123", "data@example.org.", "(data@example.org)"]
)
def test_croissant_states_only_the_address_of_the_contact(states, contact):
    _, folder = states(SAID | {"contact": contact})
    assert json.loads((folder / CROISSANT).read_text())["creator"]["email"] == "data@example.org"


def test_the_images_load_through_croissant(states, digits):
    _, folder = states(export=["parquet"])
    rows = list(mlcroissant.Dataset(str(folder / CROISSANT)).records("images"))
    assert [row["images/label"] for row in rows] == digits.labels[:40].tolist()
    assert np.array_equal(np.asarray(rows[7]["images/image"]), digits.images[7, ..., 0])


def test_croissant_lists_files_with_their_hashes(states):
    _, folder = states(export=["npz"])
    record = json.loads((folder / CROISSANT).read_text())
    listed = json.loads((folder.parent / "synthesize" / "privacy.json").read_text())["files"]
    files = {entry["@id"]: entry for entry in record["distribution"]}
    del files["privacy.json"]
    assert {name: file["sha256"] for name, file in files.items()} == {
        name: sha for name, sha in listed.items() if not name.startswith("classes/")
    }
    assert all((folder / entry["contentUrl"]).is_file() for entry in files.values())
    assert record["license"] == "cc-by-4.0" and record["creator"]["email"] == "data@example.org"
    assert any("several images of one person" in gap for gap in record["rai:dataLimitations"])


TEXT = {"type": "string", "minLength": 1}
MOST = {"type": "number", "exclusiveMinimum": 0}


def entry(needed: dict, more: dict | None = None) -> dict:
    """Return the JSON Schema of an object. needed: keys that it must have; more: keys that it may
    have.
    """
    properties = {
        key: {"enum": value} if isinstance(value, list) else value
        for key, value in (needed | (more or {})).items()
    }
    return {
        "type": "object",
        "required": [*needed],
        "properties": properties,
        "additionalProperties": False,
    }


def texts(*keys: str) -> dict:
    return dict.fromkeys(keys, TEXT)


# The keys, types and values of `schemas/deployments-schema.yaml` of the repository
# opendp/deployments-registry-data, commit 057e5d8 (2026), as far as an entry uses them. What that
# schema only recommends for tier 3 is required here.
SOURCE = ["Peer-reviewed publication", "Formal publication by the deploying organization"]
SOURCE += ["Authorized organizational attestation", "Other public source"]
CURATOR = entry(
    {**texts("data_curator_name"), "data_curator_type": ["Government", "Industry", "Nonprofit"]}
)
SCHEMA = entry(
    {
        "url_slug": {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
        "deployment": entry(
            {
                "basic": entry(
                    {
                        **texts("name", "description", "intended_use", "data_product_region"),
                        "data_curators": {"type": "array", "minItems": 1, "items": CURATOR},
                        "data_product_type": [
                            "Dataset",
                            "Synthetic data",
                            "Machine learning model",
                        ],
                        "publication_date": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
                    },
                    {
                        "data_product_sector": [
                            "Technology",
                            "Healthcare",
                            "Education",
                            "Government",
                            "Energy",
                            "Finance",
                        ]
                    },
                ),
                "dp_variant": entry(
                    {
                        "variant_name": ["Approximate DP"],
                        **texts("data_domain", "unprotected_quantities"),
                    }
                ),
                "privacy_loss": entry(
                    {
                        **texts(
                            "privacy_unit", "privacy_unit_details", "privacy_parameters_details"
                        ),
                        "number_of_privacy_units": {"type": "integer", "minimum": 1},
                        "privacy_parameters": entry({"epsilon": MOST, "delta": MOST}),
                    }
                ),
                "deployment_model": entry(
                    {
                        **texts(
                            "trust_assumptions",
                            "actors",
                            "release_type_details",
                            "access_type_details",
                        ),
                        "model_name": ["Central"],
                        "release_type": ["One release"],
                        "data_source_type": ["Static"],
                        "access_type": ["Non-interactive"],
                    }
                ),
                "implementation": entry(
                    {
                        **texts(
                            "preprocessing_and_hyperparameter_tuning", "mechanisms", "composition"
                        ),
                        **texts("post_processing", "justification", "additional_information"),
                    }
                ),
                "administrative": entry(
                    {
                        "evidence_sources": {
                            "type": "object",
                            "patternProperties": {
                                r"^\w+$": entry(
                                    {
                                        "evidence_source_type": SOURCE,
                                        "misc": entry(
                                            texts("title", "publisher", "year", "note"),
                                            texts("url"),
                                        ),
                                    }
                                )
                            },
                            "additionalProperties": False,
                        },
                        "status": ["Draft"],
                        "registry_authors": {"type": "array", "minItems": 1, "items": TEXT},
                        "tier": [1, 2, 3],
                    }
                ),
            }
        ),
    }
)


def fits(content) -> bool:
    return Draft202012Validator(SCHEMA).is_valid(content)


def test_the_registrys_entry_fits_its_schema(states):
    missing, folder = states({**SAID, "sector": "Healthcare"})
    content = yaml.safe_load((folder / REGISTRY).read_text())
    loss = content["deployment"]["privacy_loss"]
    basic = content["deployment"]["basic"]
    assert missing == {} and fits(content)
    assert (
        basic["publication_date"] == "2026-11-21" and basic["data_product_type"] == "Synthetic data"
    )
    assert 0.679 < loss["privacy_parameters"]["epsilon"] < 0.68
    assert loss["privacy_parameters"]["delta"] == default_delta(1500)
    assert (
        loss["privacy_unit"] == "one image with its label"
        and loss["number_of_privacy_units"] == 1500
    )
    mechanisms = content["deployment"]["implementation"]["mechanisms"]
    assert "noise multiplier 5" in mechanisms and "discrete" not in mechanisms
    basic["data_product_type"] = "Pictures"
    assert not fits(content)


@pytest.fixture(scope="module")
def shapes() -> Graph:
    """Return the published shapes, except two without a path, which pySHACL refuses."""
    graph = Graph()
    for file in sorted(PUBLISHED.glob("*/*.ttl")):
        graph.parse(file)
    for one in [
        one
        for one in graph.triples((None, SH.property, None))
        if (one[2], SH.path, None) not in graph
    ]:
        graph.remove(one)
    return graph


def problems(graph: Graph, shapes: Graph) -> str:
    """Return the violations that the shapes find."""
    valid, _, text = validate(graph, shacl_graph=shapes)
    return "" if valid else text


def test_the_published_shapes_are_unchanged():
    listed = re.findall(r"`(\S+\.ttl)` \| ([0-9a-f]{64})", (PUBLISHED / "README.md").read_text())
    found = {
        file.relative_to(PUBLISHED).as_posix(): digest_of_file(file)
        for file in PUBLISHED.glob("*/*.ttl")
    }
    assert dict(listed) == found and len(found) == 4


def test_the_catalogue_s_entry_fits_the_published_shapes(states, shapes):
    missing, folder = states(HEALTH)
    graph = Graph().parse(folder / TURTLE)
    assert missing == {} and problems(graph, shapes) == ""
    assert isomorphic(graph, Graph().parse(folder / CATALOGUE))
    sample = graph.value(predicate=URIRef("http://www.w3.org/ns/adms#sample"))
    about = next(str(text) for text in graph.objects(sample, DCTERMS.description))
    assert "ε = 0.6792" in about and "one image with its label" in about


def test_the_catalogue_s_terms_name_their_vocabulary(states):
    """A validator may not have the EU's vocabularies.

    It then finds the vocabulary of a term from `skos:inScheme`, and from the term's address.
    """
    _, folder = states(HEALTH)
    graph = Graph().parse(folder / TURTLE)
    schemes = {str(term): str(scheme) for term, scheme in graph.subject_objects(SKOS.inScheme)}
    assert sorted(term.removeprefix(f"{scheme}/") for term, scheme in schemes.items()) == [
        *("EHRS", "HEAL", "NON_PUBLIC", "PERSONAL_DATA")
    ]


def test_a_description_of_variables_comes_with_structured_data(states):
    """The published shape of this rule has no path, so this test replaces the shape."""
    _, folder = states(HEALTH)
    graph = Graph().parse(folder / TURTLE)
    (dataset,) = graph.subjects(RDF.type, DCAT.Dataset)
    assert graph.value(dataset, URIRef(f"{HEALTH_TERMS}hasStructuredData")) == Literal(True)
    assert graph.value(dataset, URIRef(f"{HEALTH_TERMS}hasVariables"))


def test_the_shapes_find_each_statement_that_is_taken_away(states, shapes):
    _, folder = states(HEALTH)
    whole = Graph().parse(folder / TURTLE)
    (dataset,) = whole.subjects(RDF.type, DCAT.Dataset)
    beyond = {RDF.type, URIRef(f"{HEALTH_TERMS}hasVariables")} | RECOMMENDED
    for name in {*whole.predicates(dataset)} - beyond:
        part = Graph() + whole
        part.remove((dataset, name, None))
        assert problems(part, shapes), name
    for subject in whole.subjects(DCAT.accessURL):
        part = Graph() + whole
        part.remove((subject, DCAT.accessURL, None))
        assert "accessURL" in problems(part, shapes)


def test_the_catalogue_s_entry_is_the_same_bytes_each_time(states):
    found = set()
    for _ in range(3):
        _, folder = states(HEALTH)
        found.add((folder / TURTLE).read_bytes())
    assert len(found) == 1


@pytest.mark.parametrize("words", ['"}, {"x": "', "{url} \u2028 <c>'", "data office, room 5"])
def test_hostile_answers_stay_text_in_the_catalogue(states, shapes, words):
    answers = dict.fromkeys(("owner", "contact", "purpose", "legal_basis", "access_body"), words)
    address = {"url": 'https://example.org/"><b>', "access_url": "https://example.org/{x}|"}
    missing, folder = states(HEALTH | answers | address)
    graph = Graph().parse(folder / TURTLE)
    assert missing == {} and problems(graph, shapes) == ""
    assert {str(name) for name in graph.objects(None, FOAF.name)} == {words}


def test_the_catalogue_names_what_is_missing_once_asked_for(states):
    missing, folder = states({**SAID, "health_category": "EHRS"})
    assert missing == {
        TURTLE: ["release.legal_basis", "release.url", "release.access_body", "release.access_url"]
    }
    assert not (folder / TURTLE).exists() and not (folder / CATALOGUE).exists()


@pytest.mark.parametrize(
    "words", ['"}, {"x": "', "{guarantee} {0} %s {{ x }}", "=epsilon", "a: [b\u2028 & <c>'"]
)
def test_the_owner_s_words_are_text_whatever_they_hold(states, words):
    missing, folder = states(
        {**SAID, "owner": words, "purpose": words, "region": words, "licence": words}
    )
    record = json.loads((folder / CROISSANT).read_text())
    entry = yaml.safe_load((folder / REGISTRY).read_text())
    assert missing == {} and fits(entry)
    assert record["creator"]["name"] == record["license"] == words and record[
        "rai:dataUseCases"
    ] == [words]
    assert record["citeAs"].startswith(f"{words}: clinic-2026, ")
    assert (
        entry["deployment"]["basic"]["intended_use"]
        == entry["deployment"]["basic"]["data_product_region"]
        == words
    )


def test_public_images_are_a_dataset_and_not_synthetic(states):
    _, folder = states(sources=["select"])
    entry = yaml.safe_load((folder / REGISTRY).read_text())["deployment"]["basic"]
    assert (
        entry["data_product_type"] == "Dataset"
        and "public images, privately selected" in entry["description"]
    )
    record = json.loads((folder / CROISSANT).read_text())
    assert "synthetic data" not in record["keywords"] and "public images" in record["description"]


def test_without_the_owners_words_there_is_no_entry(states):
    missing, folder = states({"owner": "The clinic"})
    assert missing == {REGISTRY: ["release.owner_type", "release.purpose", "release.region"]}
    assert not (folder / REGISTRY).exists() and (folder / CROISSANT).exists()


def test_a_ledger_that_does_not_hold_gets_no_statement(states, tmp_path):
    _, folder = states()
    (tmp_path / "ledger.json").write_text(
        (tmp_path / "ledger.json").read_text().replace('"delta": ', '"delta": 1')
    )
    (folder / CROISSANT).unlink()
    with pytest.raises(BudgetError):
        write_statements(tmp_path / "artifacts" / "synthesize", tmp_path / "ledger.json", folder)
    assert not (folder / CROISSANT).exists()


def test_the_page_follows_the_order_of_sp_800_226(states, tmp_path):
    states()
    page = report_page(tmp_path / "artifacts" / "synthesize", tmp_path / "ledger.json")
    marks = [
        'id="released"',
        'id="unit"',
        'id="trust"',
        'id="guarantee"',
        'id="ledger"',
        'id="gaps"',
        'id="check"',
    ]
    places = [page.index(mark) for mark in marks]
    assert (
        places == sorted(places)
        and "The clinic" in page
        and "data@example.org" in page
        and "Teaching." in page
    )

"""The statements beside the report: Croissant by its own validator, the registry's entry by its schema."""

import json
import re
import shutil

import mlcroissant
import numpy as np
import pytest
import yaml
from small_release import RECORD, write_release

from sfumato.errors import BudgetError
from sfumato.privacy.accountant import default_delta
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.release.report import report_page
from sfumato.release.statements import CROISSANT, REGISTRY, write_statements

SAID = {"owner": "The clinic", "owner_type": "Nonprofit", "purpose": "Teaching.", "region": "Europe"}
SAID |= {"contact": "data@example.org", "licence": "cc-by-4.0"}


@pytest.fixture
def states(digits, tmp_path):
    """A release, its ledger, and the statements of both as a function: (what is missing, folder of the statements)."""

    def make(about=SAID, **more):
        shutil.rmtree(tmp_path / "artifacts", ignore_errors=True)
        release, ledger = tmp_path / "artifacts" / "synthesize", tmp_path / "ledger.json"
        write_release(release, digits, about=about, **more)
        budget = {"recipe": "r", "accountant": "rdp", "delta": default_delta(1500), "size_hint": 1500, "target": 1.0}
        ledger.write_text(ledger_text(build_ledger(budget, {RECORD["id"]: dict(RECORD)}, [])))
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


def test_the_images_load_through_croissant(states, digits):
    _, folder = states(export=["parquet"])
    rows = list(mlcroissant.Dataset(str(folder / CROISSANT)).records("images"))
    assert [row["images/label"] for row in rows] == digits.labels[:40].tolist()
    assert np.array_equal(np.asarray(rows[7]["images/image"]), digits.images[7, ..., 0])


def test_croissant_lists_every_file_with_its_hash_and_says_who_publishes(states):
    _, folder = states(export=["npz"])
    record = json.loads((folder / CROISSANT).read_text())
    listed = json.loads((folder.parent / "synthesize" / "privacy.json").read_text())["files"]
    files = {entry["@id"]: entry for entry in record["distribution"]}
    assert set(files) == {*listed, "privacy.json"} and all(files[name]["sha256"] == sha for name, sha in listed.items())
    assert all((folder / entry["contentUrl"]).is_file() for entry in files.values())
    assert record["license"] == "cc-by-4.0" and record["creator"]["email"] == "data@example.org"
    assert any("several images of one person" in gap for gap in record["rai:dataLimitations"])


# what the registry's schema asks of an entry: a type, a pattern of the whole text, or the parts; "?": may be missing
PUBLISHERS, SECTORS = "Government|Industry|Nonprofit", "Technology|Healthcare|Education|Government|Energy|Finance"
SCHEMA = {
    "url_slug": "[a-z0-9]+(-[a-z0-9]+)*",
    "deployment": {
        "basic": {
            **dict.fromkeys(("name", "description", "intended_use", "data_product_region"), "(?s).+"),
            "data_curators": [{"data_curator_name": ".+", "data_curator_type": PUBLISHERS}],
            "data_product_type": "Dataset|Synthetic data",
            "data_product_sector?": SECTORS,
            "publication_date": r"\d{4}-\d{2}-\d{2}",
        },
        "dp_variant": {"variant_name": "Approximate DP", "data_domain": ".+", "unprotected_quantities": ".+"},
        "privacy_loss": {
            **dict.fromkeys(("privacy_unit", "privacy_unit_details", "privacy_parameters_details"), ".+"),
            "number_of_privacy_units": int,
            "privacy_parameters": {"epsilon": float, "delta": float},
        },
        "deployment_model": {
            **{"model_name": "Central", "trust_assumptions": ".+", "release_type": "One release"},
            **{"release_type_details": ".+", "data_source_type": "Static", "access_type": "Non-interactive"},
        },
        "implementation": {
            **dict.fromkeys(("mechanisms", "composition", "post_processing", "additional_information"), "(?s).+"),
            "preprocessing_and_hyperparameter_tuning": "(?s).+",
        },
        "administrative": {"status": "Draft", "registry_authors": [".+"], "tier": int},
    },
}


def fits(content, schema) -> bool:
    if isinstance(schema, dict):
        parts = {key.rstrip("?"): part for key, part in schema.items()}
        needed = {key for key in schema if not key.endswith("?")}
        return needed <= content.keys() <= parts.keys() and all(fits(content[key], parts[key]) for key in content)
    if isinstance(schema, list):
        return len(content) > 0 and all(fits(one, schema[0]) for one in content)
    if isinstance(schema, str):
        return isinstance(content, str) and re.fullmatch(schema, content) is not None
    return isinstance(content, schema) and content > 0


def test_the_registry_s_entry_fits_its_schema_and_states_the_ledger(states):
    missing, folder = states({**SAID, "sector": "Healthcare"})
    content = yaml.safe_load((folder / REGISTRY).read_text())
    loss, basic = content["deployment"]["privacy_loss"], content["deployment"]["basic"]
    assert missing == [] and fits(content, SCHEMA)
    assert basic["publication_date"] == "2026-11-21" and basic["data_product_type"] == "Synthetic data"
    assert 0.679 < loss["privacy_parameters"]["epsilon"] < 0.68
    assert loss["privacy_parameters"]["delta"] == default_delta(1500)
    assert loss["privacy_unit"] == "one image with its label" and loss["number_of_privacy_units"] == 1500
    mechanisms = content["deployment"]["implementation"]["mechanisms"]
    assert "noise multiplier 5" in mechanisms and "discrete" not in mechanisms
    basic["data_product_type"] = "Pictures"
    assert not fits(content, SCHEMA)


@pytest.mark.parametrize("words", ['"}, {"x": "', "{guarantee} {0} %s {{ x }}", "=epsilon", "a: [b\u2028 & <c>'"])
def test_the_owner_s_words_are_text_whatever_they_hold(states, words):
    missing, folder = states({**SAID, "owner": words, "purpose": words, "region": words, "licence": words})
    record, entry = json.loads((folder / CROISSANT).read_text()), yaml.safe_load((folder / REGISTRY).read_text())
    assert missing == [] and fits(entry, SCHEMA)
    assert record["creator"]["name"] == record["license"] == words and record["rai:dataUseCases"] == [words]
    assert record["citeAs"].startswith(f"{words}: clinic-2026, ")
    assert entry["deployment"]["basic"]["intended_use"] == entry["deployment"]["basic"]["data_product_region"] == words


def test_public_images_are_a_dataset_and_not_synthetic(states):
    _, folder = states(sources=["select"])
    entry = yaml.safe_load((folder / REGISTRY).read_text())["deployment"]["basic"]
    assert entry["data_product_type"] == "Dataset" and "public images, privately selected" in entry["description"]
    record = json.loads((folder / CROISSANT).read_text())
    assert "synthetic data" not in record["keywords"] and "public images" in record["description"]


def test_without_the_owner_s_words_there_is_no_entry_and_it_is_said_what_is_missing(states):
    missing, folder = states({"owner": "The clinic"})
    assert missing == ["release.owner_type", "release.purpose", "release.region"]
    assert not (folder / REGISTRY).exists() and (folder / CROISSANT).exists()


def test_a_ledger_that_does_not_hold_gets_no_statement(states, tmp_path):
    _, folder = states()
    (tmp_path / "ledger.json").write_text((tmp_path / "ledger.json").read_text().replace('"delta": ', '"delta": 1'))
    (folder / CROISSANT).unlink()
    with pytest.raises(BudgetError):
        write_statements(tmp_path / "artifacts" / "synthesize", tmp_path / "ledger.json", folder)
    assert not (folder / CROISSANT).exists()


def test_the_page_goes_in_the_order_of_sp_800_226_and_holds_the_owner_s_words(states, tmp_path):
    states()
    page = report_page(tmp_path / "artifacts" / "synthesize", tmp_path / "ledger.json")
    marks = ['id="released"', 'id="unit"', 'id="trust"', 'id="guarantee"', 'id="ledger"', 'id="gaps"', 'id="check"']
    places = [page.index(mark) for mark in marks]
    assert places == sorted(places) and "The clinic" in page and "data@example.org" in page and "Teaching." in page

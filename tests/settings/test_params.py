"""Settings: what they accept, what they fill in, what they refuse."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from parts import of_baselines
from pydantic import ValidationError

from sfumato.errors import ConfigError
from sfumato.settings.data import Data
from sfumato.settings.fields import Strict
from sfumato.settings.params import Params
from sfumato.settings.privacy import Privacy
from sfumato.settings.queries import Central
from sfumato.settings.recipes import params_of, recipe_files
from sfumato.settings.training import Pretrain

INFINITY = float("inf")
NAN = float("nan")
PARAMS = Path("params.yaml")
SHARES = [{}, {1: "rest"}, {1: 5.0}, {"one": "3%"}, {-1: "3%"}, {True: "3%"}]
WEIGHTS = [{}, {1: -1}, {1: "4"}, {"one": 1}, {-1: 2}, {1: True}, {1: [2]}, {1: NAN}]


def test_defaults_are_valid_and_settings_are_frozen():
    params = Params()
    with pytest.raises(ValidationError):
        params.seed = 1


@pytest.mark.parametrize(
    ("given", "kept"), [(5, 5.0), ("3%", "3%"), (" 2.50 % ", "2.5%"), ("rest", "rest")]
)
def test_noise_is_a_multiplier_a_share_or_the_rest(given, kept):
    assert Central(noise=given).noise == kept


@pytest.mark.parametrize(
    ("given", "kept"), [(28, 28), ([28, 28], 28), ([24, 32], (24, 32)), (None, None)]
)
def test_a_size_is_one_number_or_rows_and_columns(given, kept):
    data = Data(dataset_id="set", size=given)
    assert data.size == kept and Data.model_validate_json(data.model_dump_json()) == data


@pytest.mark.parametrize("size", [0, [24], [24, 0], [1, 2, 3], "24x32"])
def test_a_size_of_another_form_is_refused(size):
    with pytest.raises(ValidationError, match="size"):
        Data(dataset_id="set", size=size)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            ({"central": {"noise": noise}}, r"central\.noise")
            for noise in (0, -1, INFINITY, "0%", "100%", "lots", None)
        ),
        *(
            ({"frequency": {"noise": table}}, "value of ε|values by ε|noise for ε|is not a noise")
            for table in SHARES
        ),
        *(
            (
                {"synthesize": {"sources": {"auxiliary": table}}},
                "value of ε|by ε|weight of auxiliary for ε",
            )
            for table in WEIGHTS
        ),
        *(
            ({"data": {"dataset_id": name}}, "dataset_id")
            for name in ("../up", "", "a/b", ".hidden", "x" * 65)
        ),
        *(
            (
                {"finetune": {"noise_levels": {"law": "timesteps", "bounds": bounds}}},
                "expected . increasing integers",
            )
            for bounds in ((0, 1000), (0, 800, 200, 1000), (0, 200, 800, 1200))
        ),
        (
            {"privacy": {"epsilon": 10}, "synthesize": {"sources": {"select": {1: 2, 10: 0}}}},
            r"synthesize\.sources",
        ),
        ({"privacy": {"epsilon": "1"}}, r"privacy\.epsilon\n.*valid number"),
        ({"privacy": {"delta": 1e-320}}, r"privacy\.delta"),
        ({"privacy": {"spend_again": [["count"]]}}, r"privacy\.spend_again"),
    ],
)
def test_what_means_nothing_is_refused(content, message):
    with pytest.raises(ValidationError, match=message):
        Params(**content)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"privacy": {"epsilon": True}}, "epsilon"),
        ({"count": {"noise": True}}, "noise"),
        ({"seed": False}, "seed"),
        ({"data": {"classes": ["a", False]}}, "classes"),
        ({"pretrain": {"phases": [{"sources": {"public": 1}, "steps": True}]}}, "steps"),
        ({"synthesize": {"sources": {"auxiliary": True}}}, "sources"),
        ({"privacy": {"spend_again": {"count": True}}}, "spend_again"),
    ],
)
def test_true_is_no_number_and_no_text(content, key):
    """Python treats true as 1, so `epsilon: true` would spend ε = 1."""
    with pytest.raises(ConfigError, match=f"params.yaml: {key} must not be true or false"):
        params_of(content, PARAMS)
    assert params_of({"data": {"different_people": True}}, PARAMS).data.different_people


@pytest.mark.parametrize(
    ("content", "form"),
    [
        ({"synthesize": {"export": "png"}}, "a list"),
        ({"pretrain": {"phases": {"sources": {"public": 1}}}}, "a list"),
        ({"synthesize": {"sources": ["auxiliary"]}}, "keys and values"),
        ({"frequency": {"features": ["patches"]}}, "keys and values"),
        ({"release": "The clinic"}, "keys and values"),
    ],
)
def test_a_value_of_another_form_is_refused_in_words_of_yaml(content, form):
    with pytest.raises(ConfigError, match=f"is not valid: expected {form}, such as"):
        params_of(content, PARAMS)


def test_a_fault_of_several_keys_names_its_section_only():
    for section, content, reason in (
        ("frequency", {"noise": {"one": "3%"}}, "'one' is not a value of ε"),
        ("synthesize", {"distorted": 0.9, "mixed": 0.9}, "distorted=0.9 and mixed=0.9 leave no"),
    ):
        with pytest.raises(ConfigError) as refusal:
            params_of({section: content}, PARAMS)
        assert str(refusal.value).startswith(f"params.yaml: {section}: {reason}")
        assert "={" not in str(refusal.value)


def test_a_rule_for_several_keys_applies_to_the_merged_values():
    blended = {"recipe": "teacher-gaussian", "profile": None, "synthesize": {"mixed": 0.1}}
    assert params_of(blended, PARAMS).synthesize.relabel
    with pytest.raises(ConfigError, match=r"^params\.yaml: .*set relabel: true"):
        params_of({**blended, "recipe": "dp-merf"}, PARAMS)


@pytest.mark.parametrize(
    ("line", "own", "message"),
    [
        ("frequency: {sise: 8}", {}, r"mine\.yaml: unknown key 'frequency\.sise'"),
        ("frequency: {size: 9}", {}, r"mine\.yaml: frequency\.size=9"),
        ("frequency: {size: 8}", {"count": {"noise": "x"}}, r"params\.yaml: count\.noise='x'"),
        ("count: 5", {"count": {"noise": "2%"}}, r"mine\.yaml: count=5 is not valid"),
        ("data: 5", {"data": {"dataset_id": "set"}}, r"mine\.yaml: data=5 is not valid"),
        ("seed: true", {"seed": 1}, r"mine\.yaml: seed must not be true"),
    ],
)
def test_a_message_names_the_file_that_sets_the_value(line, own, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"run: [frequency, synthesize]\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        params_of({"recipe": "mine", "profile": None, **own}, PARAMS, tmp_path)


def test_own_recipes_do_not_hide_the_recipes_of_the_package(tmp_path):
    (tmp_path / "mine.yaml").write_text("run: [count, synthesize]")
    (tmp_path / "dpdm.yaml").write_text("run: [synthesize]")
    files = recipe_files(tmp_path)
    assert {*files} == {*recipe_files(tmp_path / "missing"), "mine"}
    assert files["mine"].parent == files["dpdm"].parent == tmp_path != files["dp-merf"].parent
    assert recipe_files(tmp_path, "profile") == recipe_files(tmp_path / "missing", "profile")
    for name, length in {"dp-merf": 5, "dpdm": 1}.items():
        content = {"recipe": name, "profile": "digits"}
        assert len(params_of(content, PARAMS, tmp_path).run) == length
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        params_of({"recipe": "mina"}, PARAMS, tmp_path)


@pytest.mark.parametrize("section", ["data", "public"])
@pytest.mark.parametrize(
    ("source", "hint"),
    [("imagefoldr", r"did you mean 'imagefolder'\?"), ("painting", "expected one of .*, npz")],
)
def test_an_unknown_source_is_refused_with_the_nearest_name(section, source, hint):
    message = rf"params\.yaml: {section}\.source='{source}' is not valid: {hint}"
    with pytest.raises(ConfigError, match=message):
        params_of({section: {"source": source}}, PARAMS)


def numbers_in(node: object) -> Iterator[dict]:
    """Yield each part of a JSON schema that describes a float."""
    if isinstance(node, dict) and node.get("type") == "number":
        yield node
    for inner in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from numbers_in(inner)


# Keys that a function limits, or that contain values of pixels
BOUNDED_ELSEWHERE = {"noise", "lifetime_epsilon", "range", "mean"}


def test_every_float_of_a_stage_has_two_limits():
    """A value that no owner would choose, 1e-38 or 1e38, costs ε and releases nothing of use."""
    found = {}
    for section, model in Params.model_json_schema()["$defs"].items():
        for key, schema in model["properties"].items():
            for number in numbers_in(schema):
                found[f"{section}.{key}"] = (
                    {*number} & {"minimum", "exclusiveMinimum"},
                    {*number} & {"maximum", "exclusiveMaximum"},
                )
    assert len(found) > 30
    open_ended = [name for name, limits in found.items() if not all(limits)]
    assert [name for name in open_ended if name.split(".")[1] not in BOUNDED_ELSEWHERE] == []


EXTREME = (1e-38, 1e38, 1e8, 0.0, -1.0, NAN, INFINITY)
RATES = {
    "finetune": ("learning_rate", "max_grad_norm"),
    **of_baselines("baseline_settings", "RATES"),
}
RATES |= {
    "teacher": ("learning_rate", "max_norm", "average"),
    "saliency": ("max_norm",),
    "count": ("noise",),
}
RATES |= {
    "central": ("max_norm", "noise"),
    "auxiliary": ("learning_rate",),
    "refine": (),
    "pretrain": ("learning_rate",),
}


@pytest.mark.parametrize("value", EXTREME)
@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section, keys in RATES.items() for key in keys]
)
def test_an_extreme_number_is_refused_before_anything_is_charged(section, key, value):
    with pytest.raises(ValidationError, match=key):
        Params(**{section: {key: value}})


@pytest.mark.parametrize(
    "law", [{"mean": 1e38}, {"mean": NAN}, {"mean": -1e3}, {"std": 1e38}, {"std": 1e-38}]
)
def test_noise_levels_beyond_what_a_float_holds_are_refused(law):
    with pytest.raises(ValidationError, match="noise_levels"):
        Params(finetune={"noise_levels": {"law": "log-normal", **law}})


def test_every_section_refuses_unknown_keys():
    for name in (
        name for name, field in Params.model_fields.items() if isinstance(field.default, Strict)
    ):
        with pytest.raises(ValidationError, match="extra"):
            Params(**{name: {"surely_unknown": 1}})


def test_a_phase_may_name_its_own_steps():
    phases = Pretrain(
        steps=100, phases=[{"sources": {"central": 1}, "steps": 7}, {"sources": {"auxiliary": 1}}]
    ).phases
    assert [phase.steps for phase in phases] == [7, 100]


def test_what_cannot_be_guessed_must_be_given():
    assert Data(source="mnist").name == "mnist"
    assert Data(source="mnist", path="x", dataset_id="mnist").name == "mnist"
    with pytest.raises(ConfigError, match="dataset_id"):
        _ = Data(source="imagefolder", path="x").name
    with pytest.raises(ConfigError, match="dataset_id is missing, but data.path is set"):
        _ = Data(source="mnist", path="x").name
    with pytest.raises(ConfigError, match="size_hint"):
        _ = Privacy().size


@pytest.mark.parametrize(
    ("epsilon", "share"), [(0.5, "30%"), (1, "30%"), (10**0.5, "9.487%"), (10, "3%"), (40, "3%")]
)
def test_a_share_may_depend_on_epsilon(epsilon, share):
    """Between ε = 1 and ε = 10, the share is 30 · (3/30)^log10(ε) %. Outside, it is constant."""
    table = {1: "30%", 10: "3%"}
    params = Params(
        privacy={"epsilon": epsilon}, frequency={"noise": table}, embedding={"noise": {2: "7%"}}
    )
    assert params.frequency.noise == share and params.embedding.noise == "7%"


@pytest.mark.parametrize(
    ("epsilon", "weight"), [(0.5, 2.0), (1, 2.0), (10**0.5, 1.0), (10, None), (40, None)]
)
def test_a_source_of_weight_zero_is_not_a_source(epsilon, weight):
    sources = {"auxiliary": 4, "select": {1: 2, 10: 0}}
    params = Params(privacy={"epsilon": epsilon}, synthesize={"sources": sources})
    assert params.synthesize.sources == {"auxiliary": 4.0} | ({"select": weight} if weight else {})
    assert params.synthesize.reads("select") == (weight is not None)

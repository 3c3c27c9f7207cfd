"""Plans: what they cost, what changes them, what they refuse."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import yaml
from parts import of_baselines
from small_plan import NAMES, PROFILES, RECIPES, ROOT, card, params, public_card

from sfumato.data.prepare import expected_public
from sfumato.diffusion.unet import UNet
from sfumato.errors import BudgetError, ConfigError
from sfumato.features import PACKAGE
from sfumato.generators.network import Generator
from sfumato.planning.checks import Setup
from sfumato.planning.make import risk_line
from sfumato.planning.resolve import make_plan, noise_requests, plan_texts, warnings_of
from sfumato.privacy.accountant import default_delta, epsilon
from sfumato.privacy.ledger import read_ledger
from sfumato.privacy.resolved import QueryPlan, read_stage_plan, settings_digest
from sfumato.settings.fields import MACHINE, both_sides
from sfumato.settings.queries import Count
from sfumato.settings.recipes import load_params, overlaid
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Model

FULL = load_params(ROOT / "params.yaml", RECIPES, recipe="full").run
PAPER = {"fashion-mnist-paper": (1, 28, 28), "cifar10-paper": (3, 32, 32)}


TEACHER = {"recipe": "teacher-generator"}
OWN_NETWORK = {"path": "x", "sha256": "0" * 64, "architecture": "resnet18"}
ALL_OF_BOTH = [
    "count",
    "covariance",
    "frequency",
    "auxiliary",
    "teacher",
    "embedding",
    "refine",
    "synthesize",
]


def without(stage: str) -> list[str]:
    """Return the stages of the recipe `full`, except one."""
    return [name for name in FULL if name != stage]


def files(**content) -> dict:
    return make_plan(params(**content), card()).files


@pytest.mark.parametrize(
    ("profile", "target"),
    [
        ("digits", 3.0),
        ("fashion-mnist-cpu", 1.0),
        ("fashion-mnist-paper", 10.0),
        ("cifar10-paper", 10.0),
    ],
)
@pytest.mark.parametrize("recipe", NAMES)
def test_every_recipe_meets_its_budget(recipe, profile, target, tmp_path):
    loaded = params(recipe=recipe, profile=profile, privacy={"epsilon": target})
    shape = (PROFILES | PAPER)[profile]
    public = expected_public(loaded.public, shape, tmp_path, 0)[0] if loaded.reads_public else None
    made = make_plan(loaded, card(loaded.data.name, shape), public)
    assert (
        0.97 * target
        < epsilon([m.event for m in made.mechanisms.values()], made.budget["delta"])
        <= target
    )
    assert sum(row["share"] for row in made.budget["stages"].values()) == pytest.approx(1)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("recipe", NAMES)
def test_every_recipe_can_be_planned_without_a_profile(recipe, shape, tmp_path):
    loaded = params(
        recipe=recipe,
        profile=None,
        data={"dataset_id": "own", "source": "imagefolder", "path": "own"},
        privacy={"size_hint": 20000},
    )
    public = expected_public(loaded.public, shape, tmp_path, 0)[0] if loaded.reads_public else None
    make_plan(loaded, card("own", shape, source="imagefolder"), public)


@pytest.mark.parametrize(
    "profile, target, central, frequency",
    [
        ("fashion-mnist-paper", 1.0, 20, 26.6),
        ("fashion-mnist-paper", 10.0, 5, 7.4),
        ("cifar10-paper", 1.0, 15, 32.6),
        ("cifar10-paper", 10.0, 5, 8.2),
    ],
)
def test_profiles_of_the_papers_have_their_noise(profile, target, central, frequency):
    loaded = params(recipe="feta-pro", profile=profile, privacy={"epsilon": target})
    found = make_plan(loaded, card(loaded.data.name, PAPER[profile])).mechanisms
    assert found["frequency"].noise_multiplier == pytest.approx(frequency, rel=0.01)
    assert found["central"].noise_multiplier == pytest.approx(central, rel=0.05)


@pytest.mark.parametrize(
    "profile, weights, drawn",
    [("fashion-mnist-paper", 1.5e6, 1.5e6), ("cifar10-paper", 3.8e6, 1.6e6)],
)
def test_profiles_of_the_papers_have_their_sizes(profile, weights, drawn):
    loaded, (channels, side, _) = params(recipe="feta-pro", profile=profile), PAPER[profile]
    with torch.device("meta"):
        network = UNet(side, channels, 10, loaded.model)
        generator = Generator(side, channels, 10, loaded.auxiliary.latent, loaded.auxiliary.width)
    for model, expected in ((network, weights), (generator, drawn)):
        assert sum(value.numel() for value in model.parameters()) == pytest.approx(
            expected, rel=0.05
        )
    passes = loaded.finetune.steps * loaded.finetune.batch * loaded.finetune.draws
    assert passes == pytest.approx(
        {"fashion-mnist-paper": 275e6, "cifar10-paper": 216e6}[profile], rel=0.01
    )


def test_the_resolved_files_read_back(tmp_path):
    # With this noise, the budget is enough for all queries
    spent = {"frequency": {"noise": "50%"}, **of_baselines("baseline_settings", "SPENT")}
    streaming = {"synthesize": {"stream": True}}
    made = make_plan(params(recipe="full", run=list(STAGES), **spent, **streaming), card())
    for name, text in plan_texts(made).items():
        (tmp_path / name).write_text(text)
    for stage in STAGES:
        plan = read_stage_plan(tmp_path / f"{stage}.yaml", stage)
        assert plan.enabled and getattr(plan, "mechanism", None) == made.mechanisms.get(stage)
        assert isinstance(plan, QueryPlan) == (stage in made.mechanisms)
        assert "noise" not in made.files[stage]["settings"]  # the mechanism replaces it
    with pytest.raises(ConfigError, match="not a resolved configuration of `count`"):
        read_stage_plan(tmp_path / "central.yaml", "count")
    with pytest.raises(ConfigError, match="stage plan"):
        read_stage_plan(tmp_path / "none.yaml", "count")


def test_a_network_at_its_defaults_reads_back(tmp_path):
    privacy = {"epsilon": 10, "size_hint": 60000}
    made = make_plan(
        params(recipe="feta-pro", profile=None, privacy=privacy), card(shape=(1, 28, 28))
    )
    (tmp_path / "pretrain.yaml").write_text(plan_texts(made)["pretrain.yaml"])
    assert (
        read_stage_plan(tmp_path / "pretrain.yaml", "pretrain").network
        == made.params.model
        == Model()
    )


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        ({"synthesize": {"count": 77}}, {"synthesize"}),
        ({"auxiliary": {"steps": 77}}, {"auxiliary"}),
        ({"evaluate": {"epochs": 3}}, {"evaluate"}),
        ({"pretrain": {"batch": 5}}, {"pretrain"}),
        (
            {"privacy": {"spend_again": ["count"]}},
            {"count", "central", "frequency", "teacher", "finetune"},
        ),
        (
            {"seed": 3},
            {
                "frequency",
                "auxiliary",
                "classifier",
                "teacher",
                "pretrain",
                "finetune",
                "synthesize",
            },
        ),
        ({"select": {"ratio": 0.9}}, {"select"}),
        ({"pretrain": {"amp": {"radius": 0.1}}}, {"pretrain"}),
        ({"classifier": {"steps": 7}}, {"classifier"}),
        ({"teacher": {"batch": 100}}, {"teacher"}),
        ({"privacy": {"lifetime_epsilon": "unlimited"}}, set()),
        ({"finetune": {"steps": 30}}, {"finetune"}),  # queries with a share keep their noise
        ({"finetune": {"batch": 300}}, {"finetune"}),
    ],
)
def test_an_edit_changes_the_files_of_its_own_stages_only(edit, changed):
    fixed = {"recipe": "full"}
    # The teacher has a share of the budget. Fix its noise, so that only finetune is recalibrated
    if "teacher" in edit:
        fixed |= {"teacher": {"noise": 30.0}}
        edit = {"teacher": {"noise": 30.0, **edit["teacher"]}}
        changed = changed | {"finetune"}  # finetune takes the rest of the budget
    before = files(**fixed)
    after = files(**fixed | edit)
    assert {stage for stage in STAGES if before[stage] != after[stage]} == changed


def test_the_owners_words_change_the_release_alone(tmp_path):
    plain = files(recipe="feta-pro")
    words = {"owner": "The clinic", "licence": "cc-by-4.0", "purpose": "teaching"}
    other = files(recipe="feta-pro", release=words)
    assert {name for name in plain if plain[name] != other[name]} == {"synthesize"}
    assert "about" not in plain["synthesize"] and other["synthesize"]["about"] == words
    (tmp_path / "synthesize.yaml").write_text(yaml.safe_dump(other["synthesize"]))
    assert read_stage_plan(tmp_path / "synthesize.yaml", "synthesize").about == words


def test_machine_settings_come_from_the_environment_only(environment):
    before = files(recipe="sapf-pixel")
    environment["SFUMATO_MICROBATCH"] = "7"
    environment["SFUMATO_CHECKPOINT_EVERY"] = "3"
    loaded = params(recipe="sapf-pixel")
    found = loaded.finetune.on_this_machine()
    assert (found.microbatch_size, found.checkpoint_every) == (7, 3)
    assert loaded.saliency.on_this_machine().microbatch_size == 7
    assert files(recipe="sapf-pixel") == before
    assert not [key for content in before.values() for key in content["settings"] if key in MACHINE]
    for wrong in ("0", "many", "-1", "1.5"):
        environment["SFUMATO_MICROBATCH"] = wrong
        with pytest.raises(ConfigError, match=f"SFUMATO_MICROBATCH={wrong}"):
            loaded.finetune.on_this_machine()


def test_the_public_classifier_knows_no_sensitive_set():
    loaded = params(recipe="full")
    one, other = (
        make_plan(loaded, card(classes=tuple(names))).files["classifier"] for names in ("ab", "cde")
    )
    assert one == other
    assert one == files(recipe="full", privacy={"size_hint": 777})["classifier"]


def test_amp_is_of_the_phases_that_ask_for_it():
    phases = params(recipe="full", pretrain={"amp": {"radius": 0.05}}).pretrain.phases
    for phase in phases:
        assert (phase.amp.radius if phase.amp else None) == (
            0.05 if "public" in phase.sources else None
        )
    assert all(phase.amp is None for phase in params(recipe="rpgen-no-amp").pretrain.phases)


@pytest.mark.parametrize(
    ("public", "content", "message"),
    [
        (public_card("abc"), {"recipe": "rpgen", "histogram": {"votes": 4}}, "histogram.votes=4"),
        (
            public_card("abc"),
            {"recipe": "rpgen", "histogram": {"votes": 3}, "select": {"ratio": 1}},
            None,
        ),
        (
            public_card("abcdefghijklmno"),
            {"recipe": "privimage"},
            r"select\.ratio=0\.16 keeps 2 of 15 public classes.*at least 0.6667",
        ),
        (
            public_card("abcdefghijklmno"),
            {"recipe": "privimage", "select": {"ratio": 0.6667}},
            None,
        ),
        (public_card("abc"), {"recipe": "privimage", "histogram": {"votes": 1}}, "use another"),
        (
            public_card("abc"),
            {"recipe": "teacher-public", "select": {"images": 10**9}},
            "set select.images to a number from 10 to 30",
        ),
        (
            replace(public_card("abc"), images=9),
            {"recipe": "teacher-public"},
            "9 public images and 10 sensitive classes.*use a larger public set",
        ),
        (
            public_card("abcdefghijkl", "procedural"),
            {},
            r"public\.source=glyphs, but the prepared public images are from procedural",
        ),
    ],
)
def test_an_insufficient_public_set_is_refused_early(public, content, message):
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        make_plan(params(**content), card(), public)


def test_phases_share_the_steps_by_their_parts():
    phases = params(recipe="feta-pro", pretrain={"steps": 1000, "batch": 32}).pretrain.phases
    assert [phase.steps for phase in phases] == [150, 850] and all(
        phase.batch == 32 for phase in phases
    )
    assert [list(phase.sources) for phase in phases] == [["central"], ["auxiliary"]]
    swapped = params(recipe="feta-pro-ft").pretrain.phases
    assert [list(phase.sources) for phase in swapped] == [["auxiliary"], ["central"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"privacy": {"epsilonn": 1}}, r"epsilonn.*privacy\.epsilon"),
        ({"finetune": {"stepz": 1}}, r"stepz.*finetune\.steps"),
        ({"recipe": "feta-prp"}, "feta-pro"),
        ({"profile": "digit"}, "digits"),
        ({"finetune": {"steps": 0}}, "finetune.steps"),
        (
            {"finetune": {"microbatch_size": 8}},
            r"finetune\.microbatch_size was removed.*SFUMATO_MICROBATCH=8",
        ),
        ({"saliency": {"chunk": 4}}, r"saliency\.chunk was removed.*SFUMATO_MICROBATCH=4"),
        ({"finetune": {"checkpoint_every": 2}}, "SFUMATO_CHECKPOINT_EVERY=2"),
        ({"privacy": {"spend_again": ["pretrain"]}}, "spend_again.*not a query"),
        (
            {"pretrain": {"phases": [{"sources": {"central": 1}}], "steps": "ab"}},
            r"pretrain\.steps='ab'.*positive",
        ),
        (
            {"pretrain": {"phases": [{"sources": {"central": 1}, "part": "x"}]}},
            "part='x'.*positive",
        ),
        ({"pretrain": {"phases": [{"sources": {"central": 1}, "part": -1}]}}, "part=-1.*positive"),
        ({"central": {"noise": "free"}}, "central.noise.*multiplier"),
        ({"central": {"noise": 0}}, "central.noise"),
        ({"frequency": {"noise": "rest"}}, "exactly one query"),
        (
            {"run": ["count", "auxiliary", "pretrain", "finetune", "synthesize"]},
            "auxiliary requires frequency",
        ),
        (
            {"run": ["count", "frequency", "central", "pretrain", "finetune", "synthesize"]},
            "pretrain requires auxiliary",
        ),
        ({"recipe": "full", "public": {"enabled": False}}, r"public\.enabled was removed: .*run"),
        (
            {"recipe": "full", "select": {"by": "votes"}},
            "select.ratio=.* the votes of the stage `histogram`",
        ),
        (
            {"recipe": "dp-feta-mode", "central": {"max_norm": 3.0}},
            "central.max_norm=3.0 cannot be used with central.statistic=mode",
        ),
        ({"recipe": "full", "run": without("teacher")}, r"select\.by=teacher requires teacher"),
        ({"recipe": "full", "run": without("select")}, "pretrain requires select"),
        ({"run": ["count", "sinthesize"]}, "sinthesize.*did you mean 'synthesize'"),
        ({"run": ["count", "data"]}, "'data' is not a stage"),
        ({"run": ["count"]}, "nothing would be released"),
        ({"data": {"source": "digit", "dataset_id": "digits"}}, "data.source.*digits"),
        (
            {"recipe": "full", "public": {"source": "glyhps"}},
            "public.source.*did you mean 'glyphs'",
        ),
        ({"evaluate": {"classifiers": ["cnm"]}}, "evaluate.classifiers.*'lr', 'mlp', 'cnn'"),
        ({"evaluate": {"fidelity": ["mnd"]}}, "evaluate.fidelity.*did you mean 'mind'"),
        (
            {"evaluate": {"weights": "w.pth"}},
            r"evaluate\.weights requires evaluate.extractor=inception, but .* is embedded",
        ),
        (
            {"evaluate": {"fidelity": ["inception_score"]}},
            "inception_score in evaluate.fidelity requires evaluate.extractor=inception",
        ),
        (
            {"frequency": {"features": [{"map": "pixel"}]}},
            "frequency.features.*did you mean 'pixels'",
        ),
        (
            TEACHER | {"teacher": {"features": [{"map": "patch"}, {"map": "pixels"}]}},
            "teacher.feature.*mean 'patches'",
        ),
        (
            TEACHER | {"teacher": {"features": [{"map": "classifier"}, {"map": "pixels"}]}},
            "teacher.*requires classifier",
        ),
        (
            TEACHER
            | {
                "teacher": {"features": [{"map": "pixels"}, {"map": "own", "network": OWN_NETWORK}]}
            },
            "network x is not declared public.*set declared_public: true",
        ),
        (
            {"recipe": "full", "finetune": {"trainable": "salient-lora"}},
            "salient-lora requires saliency",
        ),
        (
            {"recipe": "sapf-pixel", "model": {"attention": []}},
            "trainable=salient-lora selects no weights, because model.attention is empty",
        ),
        ({"recipe": "full", "select": {"ratio": 1.5}}, "select.ratio"),
        ({"recipe": "full", "saliency": {"ratio": 0}}, "saliency.ratio"),
        ({"synthesize": {"sources": {"oracle": 1}}}, "sources"),
        (
            {"recipe": "teacher-generator", "synthesize": {"teacher_guidance": 1}},
            "requires a diffusion model",
        ),
        (
            {"recipe": "feta-pro", "synthesize": {"teacher_guidance": 1}},
            "synthesize requires teacher.* remove run from params.yaml",
        ),
        ({"synthesize": {"mark": "pixels"}}, "requires images of at least 8×16 or 16×8 pixels"),
        ({"privacy": {"delta": 0.01}}, "1/privacy.size_hint"),
        ({"data": {"holdout_fraction": 0}}, "leaves no hold-out images for evaluate"),
        ({"data": {"source": "imagefolder", "path": "x"}}, "dataset_id"),
        ({"profile": None, "recipe": "dpdm"}, "size_hint is missing"),
        ({"central": {"statistic": "mode", "max_norm": 3}}, "max_norm"),
        ({"frequency": {"size": 2}}, "frequency.size"),
        ({"central": {"pool": 2}}, r"central\.pool was removed: delete it\. .*always 1"),
        (
            {"saliency": {"candidates": "layers"}},
            r"saliency\.candidates was removed: delete it\. .*always qkv",
        ),
        (
            {"finetune": {"lora": {"rank": 8}}},
            r"finetune\.lora was removed: delete it\. .*rank.* 4",
        ),
        (
            {"pretrain": {"amp": {"steps": 2}}},
            r"pretrain\.amp\.steps was removed: delete it\. .*always 1",
        ),
        (
            {"pretrain": {"phases": [{"sources": {"central": 1}, "amp": {"rate": 1}}]}},
            r"pretrain\.phases\.0\.amp\.rate was removed: delete it\. .*always 0\.4",
        ),
        (
            {"pretrain": {"median": 2}},
            "unknown key 'pretrain.median'.*earlier versions, see docs/upgrading.md",
        ),
        (
            {"finetune": {"convergence": 1}},
            "unknown key 'finetune.convergence'(?!.*checkpoint_every)",
        ),
        ({"model": {"width": 30}}, "model.width"),
        ({"model": {"unshuffle": 4}, "data": {"dataset_id": "other"}}, "other"),
        ({"recipe": "teacher-gaussian", "run": ALL_OF_BOTH}, "refine requires a generator network"),
    ],
)
def test_mistakes_are_named_with_their_key(content, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(params(**content), card())


def test_a_map_without_installed_weights_is_refused_early(uninstall):
    uninstall(PACKAGE)
    for content in (
        TEACHER | {"teacher": {"features": [{"map": "imagenet"}, {"map": "pixels"}]}},
        TEACHER | {"teacher": {"feature": "imagenet"}},
        TEACHER | {"teacher": {"feature": "imagenet-middle"}},
        {"recipe": "dp-merf", "frequency": {"features": [{"map": "imagenet"}]}},
    ):
        with pytest.raises(
            ConfigError,
            match=r"names the feature map imagenet[a-z-]*, but its weights are not installed: run",
        ):
            make_plan(params(**content), card())


TEACHER_DIGESTS = [  # three ways to name the same teacher
    {"feature": "patches"},
    {"features": [{"map": "patches"}]},
    {"features": [{"map": "patches", "weight": 3.0}]},
]


def test_a_list_of_one_map_is_the_teacher_that_it_was():
    """A list of one map gives the same plan as the map without a list. So a project that starts to
    use such a list does not spend again.

    A longer list replaces the recipe's own map.
    """
    files = [
        make_plan(params(**TEACHER, teacher=each), card()).files["teacher"]
        for each in TEACHER_DIGESTS
    ]
    assert files[0] == files[1] == files[2] and files[0]["settings"]["feature"] == "patches"
    several = {"features": [{"map": "patches"}, {"map": "pixels", "weight": 0.5}]}
    made = make_plan(params(**TEACHER, teacher=several), card()).files["teacher"]
    assert made["settings"]["features"] == [{"map": "patches"}, {"map": "pixels", "weight": 0.5}]
    assert "feature" not in made["settings"]
    assert settings_digest(made) != settings_digest(files[0])


def test_a_network_beside_a_map_may_move_without_spending_again():
    def digest(**network) -> str:
        own = {"map": "own", "network": OWN_NETWORK | {"declared_public": True} | network}
        teacher = {"features": [{"map": "pixels"}, own]}
        return settings_digest(
            make_plan(params(**TEACHER, teacher=teacher), card()).files["teacher"]
        )

    assert digest() == digest(path="moved")
    assert digest() != digest(sha256="1" * 64)


def test_a_network_refuses_sides_that_its_blocks_do_not_divide():
    oblong = card(shape=(1, 8, 12))
    made = make_plan(params(), oblong)
    assert all(file["shape"] == [1, 8, 12] for file in made.files.values())
    with pytest.raises(
        ConfigError, match=r"unshuffle=4 does not divide the resolution \(8, 10\): use 1"
    ):
        make_plan(params(model={"unshuffle": 4}), card(shape=(1, 8, 10)))


@pytest.mark.parametrize(
    ("size", "prepared"),
    [(8, (1, 8, 8)), ((8, 12), (1, 8, 12)), ((8, 12), (1, 12, 8)), (8, (1, 8, 12))],
)
def test_a_size_is_compared_with_both_sides_of_the_images(size, prepared):
    asked = params(data={"size": size})
    if both_sides(size) == prepared[1:]:
        make_plan(asked, card(shape=prepared))
    else:
        with pytest.raises(ConfigError, match=r"data\.size=.*were prepared with"):
            make_plan(asked, card(shape=prepared))


def test_a_budget_that_cannot_be_met_names_the_stage_and_the_fix():
    message = r"privacy\.epsilon=0\.01 cannot be met: central alone costs .*remove central from run"
    with pytest.raises(BudgetError, match=message):
        make_plan(params(central={"noise": 5.0}, privacy={"epsilon": 0.01}), card())


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "params.yaml"
    twice = "privacy:\n  epsilon: 1\n  epsilon: 100\n"
    with pytest.raises(ConfigError, match="does not exist"):
        load_params(file, RECIPES)
    for text, message in (("privacy: [", "params.yaml"), (twice, "'epsilon' appears twice")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_params(file, RECIPES)


def test_a_plan_spends_its_epsilon_once_by_default():
    own = {"recipe": "dpdm", "data": {"source": "npz", "path": "a.npz", "dataset_id": "clinic"}}
    for content, lifetime in (
        ({"recipe": "dpdm", "profile": None, "privacy": {"epsilon": 3}}, 3.0),
        ({"recipe": "dpdm", "privacy": {"lifetime_epsilon": 7}}, 7.0),
        ({"recipe": "dpdm"}, "unlimited"),  # the profile's images are public
        (own | {"privacy": {"epsilon": 3}}, 3.0),  # the owner's images replace the profile's
        (own | {"privacy": {"lifetime_epsilon": "unlimited"}}, "unlimited"),
    ):
        assert params(**content).privacy.lifetime == lifetime
    with pytest.raises(ConfigError, match="lifetime_epsilon='unlimitd'"):
        params(recipe="dpdm", privacy={"lifetime_epsilon": "unlimitd"})


def test_public_profiles_alone_are_unlimited():
    for path in (RECIPES / "profiles").glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        unlimited = content["privacy"].get("lifetime_epsilon") == "unlimited"
        assert unlimited == (content["data"]["source"] in ("digits", "fashion-mnist"))
    assert "lifetime_epsilon" not in yaml.safe_load((ROOT / "params.yaml").read_text())["privacy"]


def test_sampling_rates_come_from_the_hint_alone():
    asks = noise_requests(params(privacy={"size_hint": 10_000}, finetune={"batch": 500}))
    assert asks["finetune"].sample_rate == 0.05
    assert noise_requests(params(privacy={"size_hint": 100}))["finetune"].sample_rate == 1.0


def test_overlays_merge_by_key_but_mixtures_are_replaced():
    under = {"a": {"x": 1, "y": 2}, "s": {"sources": {"finetune": 1}}}
    assert overlaid(under, {"a": {"y": 3}, "s": {"sources": {"auxiliary": 1}}}) == {
        "a": {"x": 1, "y": 3},
        "s": {"sources": {"auxiliary": 1}},
    }


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"size_hint": 3}, "cannot be protected well"),
        ({"size_hint": 100}, "cannot be protected well"),
        ({"size_hint": 1497}, "looks like an exact count"),
        ({"size_hint": 1500}, None),
        ({"size_hint": 1497, "declared_size": True}, None),
        ({"size_hint": 100, "delta": 1e-3}, None),
    ],
)
def test_a_hint_that_weakens_the_guarantee_is_reported(privacy, words):
    loaded = params(privacy=privacy)
    found = warnings_of(loaded, loaded.privacy.delta or default_delta(loaded.privacy.size), 10)
    assert [words in warning for warning in found] == ([True] if words else [])


@pytest.mark.parametrize(
    ("noise", "classes", "said"), [(50, 20, True), (50, 2, False), ("1%", 20, False)]
)
def test_a_count_of_mostly_noise_is_reported_and_unchanged(noise, classes, said):
    """Two classes of 100 images were once counted as 72 and -5.

    The default of `count.noise` does not change, because every project with the default would then
    spend again.
    """
    loaded = params(recipe="dp-merf", count={"noise": noise}, privacy={"size_hint": 2000})
    found = [
        warning
        for warning in warnings_of(loaded, 1e-5, classes)
        if "count.noise=50 is large" in warning
    ]
    assert bool(found) == said and ("about 100:" in "".join(found)) == said and Count().noise == 50


def test_a_delta_that_means_nothing_is_refused():
    with pytest.raises(ConfigError, match="the probability that there is no guarantee"):
        make_plan(params(privacy={"size_hint": 100, "delta": 0.002}), card())
    assert make_plan(params(privacy={"size_hint": 100}), card()).budget["delta"] == 1e-3


def test_a_share_of_another_recipe_gives_way_to_the_rest():
    """One params.yaml serves several recipes. In dp-merf, `frequency` takes the rest of the budget,
    even if the file gives it a share for feta-pro.
    """
    shares = {"frequency": {"noise": "30%"}, "count": {"noise": "2%"}}
    assert params(recipe="dp-merf", **shares).frequency.noise == "rest"
    assert params(recipe="feta-pro", **shares).frequency.noise == "30%"
    own = params(recipe="dp-merf", **{**shares, "count": {"noise": "rest"}})
    assert own.frequency.noise == "30%" and own.count.noise == "rest"
    with pytest.raises(ConfigError, match="exactly one query"):  # no query takes the rest
        noise_requests(
            params(recipe="dp-merf", frequency={"noise": 3.0}, privacy={"size_hint": 1500})
        )


# Noise multipliers of `full` on digits at ε = 10, in a ledger older than the exact accountant
BEFORE_EXACT = {
    "count": 3.45, "central": 6.899, "frequency": 0.5633, "teacher": 1.543, "finetune": 2.336,
}  # fmt: skip


def test_an_existing_project_keeps_accountant_and_noise():
    made = make_plan(params(recipe="full", profile="digits", privacy={"epsilon": 10}), card())
    assert {
        name: mechanism.noise_multiplier for name, mechanism in made.mechanisms.items()
    } == BEFORE_EXACT
    assert made.budget["epsilon"] == pytest.approx(9.999804389986677, rel=1e-12)
    # The accountant if params.yaml names none
    assert params(recipe="teacher-generator").privacy.accountant == "rdp"


def test_the_committed_ledger_is_of_profile_digits():
    ledger = read_ledger(ROOT / "docs/gallery/digits/ledger.json")
    made = make_plan(params(recipe="full", profile="digits", privacy={"epsilon": 10}), card())
    recorded = {record["stage"]: record["event"] for record in ledger["records"]}
    assert {name: mechanism.to_json() for name, mechanism in made.mechanisms.items()} == recorded
    assert {name: made.budget[name] for name in ("accountant", "delta", "epsilon")} == {
        "accountant": "rdp",
        "delta": ledger["delta"],
        "epsilon": pytest.approx(ledger["epsilon"]["rdp"], rel=1e-12),
    }


def test_how_pictures_were_cut_changes_no_digest():
    """A project with padded images must not spend again if it released before plans recorded the
    padding.
    """
    usual, padded = (
        make_plan(params(recipe="full", profile="digits", data={"fit": fit}), card())
        for fit in ("crop", "pad")
    )
    assert {name for name in STAGES if "prepared" in padded.files[name]} == {
        "teacher",
        "synthesize",
    }
    assert padded.files["synthesize"]["prepared"] == {"fit": "pad"} and "prepared" not in str(
        usual.files
    )
    assert padded.lineage == usual.lineage
    for name in padded.mechanisms:
        assert settings_digest(padded.files[name]) == settings_digest(usual.files[name])


def test_cards_state_epsilon_by_the_projects_accountant():
    def files_of(accountant: str) -> dict[str, dict]:
        # A small ε is accounted faster
        privacy = {"accountant": accountant, "epsilon": 1.0}
        return make_plan(params(recipe="dp-merf", profile="digits", privacy=privacy), card()).files

    plain = files_of("rdp")
    assert not any("accountant" in file for file in plain.values())
    for accountant in ("pld", "exact"):
        files = files_of(accountant)
        named = {name: file["accountant"] for name, file in files.items() if "accountant" in file}
        assert named == {"synthesize": accountant}
        assert settings_digest(plain["synthesize"]) == settings_digest(files["synthesize"])


def test_cards_state_epsilon_at_the_delta_of_the_project():
    words = {"recipe": "full", "profile": "digits"}
    usual = make_plan(params(**words), card())
    own = make_plan(params(**words, privacy={"delta": usual.budget["delta"]}), card())
    for name in ("teacher", "synthesize"):
        assert "delta" not in usual.files[name]
        assert own.files[name]["delta"] == own.budget["delta"]
    assert own.lineage == usual.lineage


def test_a_stream_without_a_network_of_its_own_is_refused():
    for stream in (True, False):
        loaded = params(recipe="teacher-public", profile=None, synthesize={"stream": stream})
        problems = STAGES["synthesize"].problems(Setup(loaded, card(), None))
        found = [
            problem for problem in problems if "synthesize.stream requires a network" in problem
        ]
        assert len(found) == stream


@pytest.mark.parametrize(("target", "sentences"), [(1e-6, 1), (1.0, 2)])
def test_a_smaller_risk_is_stated_only_if_it_looks_smaller(target, sentences):
    """At an ε near 0, both risks would be printed as 50.1 %."""
    made = make_plan(params(recipe="dp-merf", privacy={"epsilon": target}), card())
    assert risk_line(made).count("at most") == sentences

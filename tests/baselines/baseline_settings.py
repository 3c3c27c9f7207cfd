"""Settings under which the general tests run the stages and recipes of the baselines.

`tests/parts.py` adds each table to the table of the same name in the general tests.
"""

# Modules that open charges
OPENING = {"sfumato/baselines/dp_gan.py", "sfumato/baselines/private_evolution.py"}
# Recipes that together run every stage
RECIPES = ["dp-gan", "pe"]
OBLONG = ["dp-gan", "pe-dpsgd"]
# Sources of the release that are images, not networks
IMAGES = {"evolve"}
# Settings for short runs of the stages (SMALL), and for even shorter runs (SMALLER)
SMALL = {
    "evolve": {"rounds": 2, "population": 40, "images": 40},
    "adversarial": {"steps": 2, "batch": 60},
}
SMALLER = {
    "evolve": {"rounds": 1, "population": 40, "images": 40},
    "adversarial": {"steps": 2, "batch": 20},
}
SPENT = {"adversarial": {"noise": 1000.0}}
RATES = {"adversarial": ("max_grad_norm",)}
# By recipe: stages that put nothing on the GPU, and places in the code that may compute on the CPU
IDLE_IN = {"pe": {"synthesize"}}
ON_CPU = {"pe": {"features/projection.py ProjectedFeatures.projected"}}

# Cases of `tests/test_golden.py`: name -> stage, and its settings and other fields
EVOLVE = {"rounds": 2, "population": 24, "images": 12}
TOLERANCE = 5e-5  # relative tolerance of gradients through a network
MATCHED = {"tolerance": TOLERANCE, "steps": 3, "batch": 12, "microbatch_size": 8}
DRAWN_IMAGES = [
    {"sources": {"auxiliary": 1.0, "refine": 2.0}},
    {"sources": {"evolve": 1.0}, "part": 2},
]
GOLDEN = {
    "evolve": ("evolve", EVOLVE),
    "evolve in colour": ("evolve", EVOLVE | {"colour": True}),
    "adversarial": ("adversarial", MATCHED),
    "adversarial of groups": (
        "adversarial",
        MATCHED | {"steps": 2, "colour": True, "grouped": True},
    ),
    "pretrain on drawn images": (
        "pretrain",
        {
            "tolerance": TOLERANCE,
            "steps": 3,
            "batch": 12,
            "learning_rate": 1e-3,
            "phases": DRAWN_IMAGES,
            "colour": True,
        },
    ),
    **{
        f"synthesize from {name}": (
            "synthesize",
            {"count": 8, "tolerance": TOLERANCE, "steps": 3, "sources": {name: 1.0}},
        )
        for name in ("evolve", "adversarial")
    },
    "synthesize variants in grey": (
        "synthesize",
        {
            "relabel": True,
            "distorted": 0.3,
            "tolerance": TOLERANCE,
            "count": 20,
            "sources": {"evolve": 1.0},
            "mixed": 0.3,
        },
    ),
}

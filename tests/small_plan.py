"""Parameters and cards for plans, without a file or an image behind them."""

from pathlib import Path

from sfumato.data.cards import Card, PublicCard
from sfumato.settings.params import Params
from sfumato.settings.recipes import params_of

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "pipelines"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PROFILES = {"digits": (1, 8, 8), "fashion-mnist-cpu": (1, 28, 28)}


def params(**content) -> Params:
    """Return the parameters of a `params.yaml` with this content."""
    return params_of(content, Path("params.yaml"), RECIPES)


def card(dataset_id="digits", shape=(1, 8, 8), **more) -> Card:
    about = {
        "source": dataset_id,
        "classes": tuple("0123456789"),
        "split": "keyed",
        "version": "v",
        **more,
    }
    return Card(dataset_id=dataset_id, shape=shape, **about)


def public_card(classes: str, source="glyphs") -> PublicCard:
    """Return the card of a public set with ten images per class. classes: one letter per class."""
    images = 10 * len(classes)
    return PublicCard(
        enabled=True, source=source, shape=(1, 8, 8), classes=tuple(classes), images=images
    )

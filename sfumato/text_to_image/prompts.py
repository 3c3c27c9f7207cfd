"""The prompt of each class: a template per dataset, with overrides. Class names are public, and so are prompts."""

import re
from collections.abc import Sequence

from sfumato.errors import ConfigError, nearest
from sfumato.settings.training import Model

TEMPLATE = "An image of {article} {class}"
# By data.dataset_id: another template, or the whole prompt of each class. Source: DP-SAPF Table 14.
TEMPLATE_OF = {
    "celeba": "An image of {article} {class} face",
    "octmnist": "An optical coherence tomography (OCT) image for retinal disease {number}",
}
PROMPTS_OF = {"camelyon": {"normal": "A normal lymph node image", "tumor": "A lymph node histopathology image"}}


def class_prompts(model: Model, dataset_id: str, classes: Sequence[str]) -> list[str]:
    """One prompt for each class: the first of `model.prompts`, `model.prompt`, that of `dataset_id`, TEMPLATE.

    In a template, {class} is the name with spaces for underscores, {article} "a" or "an", {number} counts from 1.
    Raises ConfigError: an unknown field, a prompt for an unknown class, two classes with the same prompt.
    """
    for name in model.prompts:
        if name not in classes:
            hint = nearest(name, classes, f"the classes are {', '.join(classes)}")
            raise ConfigError(f"model.prompts names {name!r}, which is not a class: {hint}")
    whole: dict[str, str] = {}
    if model.prompt is None:
        whole = PROMPTS_OF.get(dataset_id, {})
    template = model.prompt or TEMPLATE_OF.get(dataset_id, TEMPLATE)
    for field in re.findall(r"\{[^{}]*\}", template):
        if field not in ("{class}", "{article}", "{number}"):
            text = "known are {class}, {article}, {number}"
            raise ConfigError(f"model.prompt={template!r} has the field {field}: {text}")
    if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", template)):
        raise ConfigError(f"model.prompt={template!r} is not a template: write it as {TEMPLATE!r}")
    prompts = []
    for number, name in enumerate(classes, start=1):
        words = re.sub(r"[_\s]+", " ", name).strip()
        article = "an" if re.match("[aeiou]", words, re.IGNORECASE) else "a"
        fields = {"class": words, "article": article, "number": str(number)}
        prompts.append(model.prompts.get(name) or whole.get(name) or template.format(**fields))
    if len(classes) > 1 and (same := [prompt for prompt in prompts if prompts.count(prompt) > 1]):
        raise ConfigError(f"two classes share the prompt {same[0]!r}: put {{class}} into model.prompt")
    return prompts

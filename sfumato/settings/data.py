"""The sections `data` and `public`: where images come from."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from sfumato.errors import ConfigError
from sfumato.settings.fields import Fraction, Positive, Strict
from sfumato.storage.documents import dataset_name

DatasetId = Annotated[str, AfterValidator(dataset_name)]


# units of privacy: one image with its label, or all images of one person
IMAGE: Literal["image"] = "image"


GROUP: Literal["group"] = "group"


OF_THE_OWNER = ("imagefolder", "npz")  # sources that hold whatever their owner put there


class Groups(Strict):
    """Where the id of each image's person is found, one way of four. The ids are private: they are never written.

    csv: a file with the columns file (its path below data.path) and group (the id); pattern: a regular expression whose
    one group is the id in a file's name; folder: pictures lie in <class>/<id>/; array: groups.npy in the folder, or
    `groups` in the archive, has an id for each image, in their order.
    """

    csv: str | None = None
    pattern: str | None = None
    folder: bool = False
    array: bool = False
    alone: bool = False  # the owner's word that an image without an id is the only one of its person

    @model_validator(mode="after")
    def one_way(self) -> Groups:
        ways = [name for name in ("csv", "pattern", "folder", "array") if getattr(self, name)]
        if len(ways) != 1:
            raise ValueError(f"it names {len(ways)} ways to find ids: give one of csv, pattern, folder, array")
        return self

    @field_validator("pattern")
    @classmethod
    def finds_one_id(cls, value: str | None) -> str | None:
        try:
            found = 1 if value is None else re.compile(value).groups
        except re.error as error:
            raise ValueError(f"it is no regular expression ({error})") from error
        if found != 1:
            raise ValueError(f"it has {found} groups in parentheses: expected one, around the id, as in '^(P\\d+)_'")
        return value


class Data(Strict):
    """Where the sensitive images come from. Everything here is public."""

    # None: as the source is called
    dataset_id: DatasetId | None = None
    source: str = "digits"  # one of SOURCES (sfumato/data/sources)
    path: str | None = None
    size: Positive | None = None  # height and width after resizing; None: as the source has them
    channels: Literal[1, 3] | None = None  # None: as the source has them
    # a public name of this state of the images: where they change, another one; None: drawn when first prepared
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    holdout_fraction: Fraction = 0.2  # ignored where the source has an official test split
    # said by the owner where images or a folder of another dataset_id come again under this one
    different_people: bool = False
    groups: Groups | None = None  # which images are of one person, for privacy.unit: group
    # said by the owner where images on which something was spent come again in other groups
    other_groups: bool = False

    @model_validator(mode="after")
    def groups_are_of_the_owner(self) -> Data:
        if self.groups is not None and self.source not in OF_THE_OWNER:
            raise ValueError(
                f"data.groups goes with images of your own ({', '.join(OF_THE_OWNER)}), not with source={self.source}"
            )
        return self

    @property
    def name(self) -> str:
        """The id that the odometer counts by. An image folder or an archive must be given one."""
        if self.dataset_id is None and self.source in OF_THE_OWNER:
            raise ConfigError(
                f"data.dataset_id is missing: name the images of this {self.source} once and for ever, "
                "such as clinic-2026"
            )
        return self.dataset_id or self.source


class Public(Strict):
    """Labelled public images: free to use, and without any guarantee of their own (METHODS §5)."""

    source: str = "glyphs"  # one of SOURCES (sfumato/data/sources)
    path: str | None = None
    per_class: Positive = 300  # images of each class, for the sources that are drawn: glyphs, procedural, photos
    fonts: Literal["matplotlib", "system"] = "matplotlib"  # glyphs only: which fonts are drawn
    # said by the owner of images that carry no privacy.json: none was made from sensitive images
    declared_public: bool = False

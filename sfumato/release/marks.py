"""What a released file says of where its pixels come from, for programs: in the XMP of a PNG, in a table's metadata.

The word is IPTC's digital source type, which platforms and Article 50 of the EU's AI Act look for in generated images.
Public images that were privately selected and labelled are not generated, and are called what they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from xml.sax.saxutils import escape

PUBLIC_SOURCE = "select"  # the source whose images are public ones
VOCABULARY = "http://cv.iptc.org/newscodes/digitalsourcetype/"
XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/">{source_type}'
    '<dc:description><rdf:Alt><rdf:li xml:lang="x-default">{description}</rdf:li></rdf:Alt></dc:description>'
    '</rdf:Description></rdf:RDF></x:xmpmeta><?xpacket end="r"?>'
)


@dataclass(frozen=True)
class Mark:
    """What the files of a release say. source_type: of IPTC's vocabulary, its address; None: not generated."""

    source_type: str | None
    description: str

    @property
    def xmp(self) -> str:
        kind = self.source_type
        element = f"<Iptc4xmpExt:DigitalSourceType>{kind}</Iptc4xmpExt:DigitalSourceType>" if kind else ""
        return XMP.format(source_type=element, description=escape(self.description))


def mark_of(sources: Collection[str]) -> Mark:
    """The mark of images that were drawn by these sources. All files of a mixture have that of a mixture."""
    if set(sources) == {PUBLIC_SOURCE}:
        return Mark(None, "A public image, privately selected and labelled. Not generated.")
    if PUBLIC_SOURCE in sources:
        return Mark(
            f"{VOCABULARY}compositeWithTrainedAlgorithmicMedia",
            "From a set of AI-generated images and of public images, privately selected and labelled.",
        )
    return Mark(
        f"{VOCABULARY}trainedAlgorithmicMedia",
        "AI-generated image. Drawn by a model that was trained with differential privacy.",
    )

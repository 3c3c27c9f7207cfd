"""Masks, thumbnails and overlays are found because their names resemble a picture's name."""

import pytest

from sfumato.data.companions import companions_in

PAIRS = {  # name of a picture: names of the files that accompany it
    "x1.png": [
        "x1_segmentation.png",
        "x1_mask.png",
        "x1-mask.png",
        "x1_seg.png",
        "x1_gt.png",
        "x1.label.png",
    ],
    "x2.jpg": [
        "x2_thumb.jpg",
        "x2_overlay.png",
        "x2_heatmap.png",
        "x2_heat_map.png",
        "mask_x2.png",
        "x2Mask.png",
    ],
    "benign (3).png": ["benign (3)_mask.png", "benign (3)_mask_1.png"],
    "img_4.png": ["mask_4.png", "4_annotations.png", "4_ground_truth.png"],
    "ISIC_0000005.jpg": ["ISIC_0000005_superpixels.png", "ISIC_0000005_Segmentation.png"],
    "BraTS_6_flair.png": ["BraTS_6_seg.png"],
    "image.png": ["mask.png"],
}


@pytest.mark.parametrize("name", PAIRS)
def test_each_picture_that_accompanies_another_is_found(name):
    names = [*PAIRS[name], "other7.png", name, "other8.png"]
    found = companions_in(names, ["in/cat"] * len(names))
    assert (found.count, found.example) == (len(PAIRS[name]), (PAIRS[name][0], name))
    folders = [f"in/{'dog' if other == name else 'cat'}" for other in names]
    assert companions_in(names, folders) is None


@pytest.mark.parametrize(
    "names",
    [
        ["x1_mask.png", "x2_mask.png", "x3.png"],
        ["with_mask_1.png", "without_mask_1.png"],
        ["P1_left.png", "P1_right.png", "P1_1.png"],
        ["masked_1.png", "1.png"],
        [],
    ],
)
def test_pictures_of_their_own_are_none(names):
    assert companions_in(names, ["in/cat"] * len(names)) is None

"""Sources that are drawn, not read: any shape, one set per seed."""

import numpy as np
import pytest
from writers import read_all_public

from sfumato.data.sources import read_public
from sfumato.errors import ConfigError
from sfumato.settings.data import Public


@pytest.mark.parametrize("source", ["glyphs", "procedural", "photos"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 9)])
def test_drawn_sources_come_in_any_shape_and_follow_the_seed(tmp_path, source, shape):
    public = Public(source=source, per_class=2)
    opened, images, labels = read_all_public(public, shape, tmp_path)
    assert images.shape[1:] == (shape[1], shape[2], shape[0]) and images.dtype == np.uint8
    assert np.bincount(labels).tolist() == [2] * len(opened.classes)
    assert np.array_equal(read_all_public(public, shape, tmp_path)[1], images)
    assert not np.array_equal(read_all_public(public, shape, tmp_path, seed=1)[1], images)


def test_a_drawn_source_refuses_a_path(tmp_path):
    with pytest.raises(ConfigError, match="reads no files"):
        read_public(Public(source="photos", path="/photos"), (1, 8, 8), tmp_path, 0)

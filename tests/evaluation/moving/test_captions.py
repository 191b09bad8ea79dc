"""What captions of clips ask for."""

import pytest

from mhla_diffusion.evaluation.moving.captions import Asked, asked_of


def test_the_last_motion_of_a_caption_counts():
    caption = "a flat spinning top moving down and left on an orange background"
    assert asked_of(caption) == Asked(caption, "down and left", "orange")
    assert asked_of("a flat whale growing") == Asked("a flat whale growing", "grow", None)
    with pytest.raises(ValueError, match="names no motion"):
        asked_of("a flat whale on a blue background")

"""The 16 dimensions of VBench with the bounds and weights of its published totals; the wheel of vbench lacks them."""

from __future__ import annotations

from typing import NamedTuple


class Dimension(NamedTuple):
    """A raw score of `low` counts as 0 and one of `high` as 1; neither is a limit, and nothing is clipped."""

    group: str  # quality or semantic
    low: float
    high: float
    weight: float = 1.0


# In the order in which VBench lists its tasks.
DIMENSIONS = {
    "subject_consistency": Dimension("quality", 0.1462, 1.0),
    "background_consistency": Dimension("quality", 0.2615, 1.0),
    "temporal_flickering": Dimension("quality", 0.6293, 1.0),
    "motion_smoothness": Dimension("quality", 0.706, 0.9975),
    "dynamic_degree": Dimension("quality", 0.0, 1.0, 0.5),
    "aesthetic_quality": Dimension("quality", 0.0, 1.0),
    "imaging_quality": Dimension("quality", 0.0, 1.0),
    "object_class": Dimension("semantic", 0.0, 1.0),
    "multiple_objects": Dimension("semantic", 0.0, 1.0),
    "human_action": Dimension("semantic", 0.0, 1.0),
    "color": Dimension("semantic", 0.0, 1.0),
    "spatial_relationship": Dimension("semantic", 0.0, 1.0),
    "scene": Dimension("semantic", 0.0, 0.8222),
    "appearance_style": Dimension("semantic", 0.0009, 0.2855),
    "temporal_style": Dimension("semantic", 0.0, 0.364),
    "overall_consistency": Dimension("semantic", 0.0, 0.364),
}
GROUP_WEIGHTS = {"quality": 4.0, "semantic": 1.0}


def members(group: str) -> dict[str, Dimension]:
    return {name: dimension for name, dimension in DIMENSIONS.items() if dimension.group == group}

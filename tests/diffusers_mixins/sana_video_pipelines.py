"""Diffusers' own tests of its SANA-Video pipelines, run on them with our transformer.

The components are ours, since theirs come from the Hub in part. See `sana_model.py` for how to run it.
"""

from diffusers import FlowMatchEulerDiscreteScheduler
from tests.pipelines.sana_video import test_sana_video as text_to_video
from tests.pipelines.sana_video import test_sana_video_i2v as image_to_video
from tiny_sana_video import stock_transformer
from tiny_sana_video_pipeline import components

from mhla_diffusion.models.convert import convert


class OnOurs:
    """Comes first among the bases."""

    def get_dummy_components(self) -> dict:
        return components(convert(stock_transformer(), block_grid=(2, 2, 3), gate=True, local_conv=3))


class TestTextToVideo(OnOurs, text_to_video.SanaVideoPipelineFastTests):
    pass


class TestImageToVideo(OnOurs, image_to_video.SanaImageToVideoPipelineFastTests):
    def get_dummy_components(self) -> dict:
        return super().get_dummy_components() | {"scheduler": FlowMatchEulerDiscreteScheduler()}

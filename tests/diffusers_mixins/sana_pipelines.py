"""Diffusers' own tests of its SANA pipelines, run on ours and on the stock ones with our transformer.

The components are ours, since theirs come from the Hub in part. See `sana_model.py` for how to run it.
"""

from diffusers import SanaControlNetModel, SCMScheduler
from tests.pipelines.sana import test_sana as text_to_image
from tests.pipelines.sana import test_sana_controlnet as controlnet
from tests.pipelines.sana import test_sana_sprint as sprint
from tests.pipelines.sana import test_sana_sprint_img2img as image_to_image
from tiny_sana import TRANSFORMER, components, stock_transformer

from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

SPRINT = {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}


class OnOurs:
    """Comes first among the bases."""

    def get_dummy_components(self) -> dict:
        return components(convert(stock_transformer(sample_size=32), block_grid=(3, 2)))


class SprintOnOurs(OnOurs):
    def get_dummy_components(self) -> dict:
        transformer = convert(stock_transformer(sample_size=32, **SPRINT), block_grid=(3, 2))
        return components(transformer) | {"scheduler": SCMScheduler()}


class TestOurTextToImage(OnOurs, text_to_image.SanaPipelineFastTests):
    pipeline_class = MHLASanaPipeline
    test_encode_prompt_works_in_isolation = (
        None  # it parses the source of classes in `diffusers.pipelines` only
    )


class TestStockTextToImage(OnOurs, text_to_image.SanaPipelineFastTests):
    pass


class TestControlNet(OnOurs, controlnet.SanaControlNetPipelineFastTests):
    def get_dummy_components(self) -> dict:
        return super().get_dummy_components() | {"controlnet": SanaControlNetModel(**TRANSFORMER).eval()}


class TestSprint(SprintOnOurs, sprint.SanaSprintPipelineFastTests):
    pass


class TestSprintImageToImage(SprintOnOurs, image_to_image.SanaSprintImg2ImgPipelineFastTests):
    pass

"""Diffusers' own tests of its Wan pipelines, run on ours and on the stock ones with our transformers.

The text parts are ours, since theirs come from the Hub; the rest is upstream's. See `wan_model.py` for how to run it.
"""

import pytest
from tests.pipelines.wan import test_wan as text_to_video
from tests.pipelines.wan import test_wan_22 as text_to_video_22
from tests.pipelines.wan import test_wan_22_image_to_video as image_to_video_22
from tests.pipelines.wan import test_wan_image_to_video as image_to_video
from tests.pipelines.wan import test_wan_video_to_video as video_to_video
from tiny_sana import tokenizer
from transformers import AutoConfig, AutoTokenizer, T5Config

from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.wan import MHLAWanPipeline


def text_config(*_, **__) -> T5Config:
    return T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, pad_token_id=0)


class OnOurs:
    """Comes first among the bases: both experts converted, with everything that they can have."""

    def get_dummy_components(self) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AutoConfig, "from_pretrained", text_config)
            patch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer())
            parts = super().get_dummy_components()
        for name in ("transformer", "transformer_2"):
            if parts.get(name) is not None:
                parts[name] = convert(parts[name], block_grid=(2, 2, 3), gate=True, local_conv=3)
        return parts

    def test_inference(self):
        # Upstream compares with numbers of its softmax; the shape of the output is what can be asked of ours.
        made = self.get_pipeline()(**self.get_dummy_inputs()).frames[0]
        assert made.shape == self.output_shape and made.isfinite().all()


class OurPipeline(OnOurs):
    pipeline_class = MHLAWanPipeline
    test_encode_prompt_works_in_isolation = (
        None  # it parses the source of classes in `diffusers.pipelines` only
    )


class TestOurs(OurPipeline, text_to_video.TestWanPipeline):
    pass


class TestOursMemory(OurPipeline, text_to_video.TestWanPipelineMemory):
    pass


class TestOurs22(OurPipeline, text_to_video_22.TestWan22Pipeline):
    pass


class TestOursTI2V(OurPipeline, text_to_video_22.TestWan225BPipeline):
    pass


class TestStock(OnOurs, text_to_video.TestWanPipeline):
    pass


class TestImageToVideo(OnOurs, image_to_video.TestWanImageToVideoPipeline):
    pass


class TestFirstLastFrame(OnOurs, image_to_video.TestWanFLFToVideoPipeline):
    pass


class TestImageToVideo22(OnOurs, image_to_video_22.TestWan22ImageToVideoPipeline):
    pass


class TestImageToVideoTI2V(OnOurs, image_to_video_22.TestWan225BImageToVideoPipeline):
    pass


class TestVideoToVideo(OnOurs, video_to_video.TestWanVideoToVideoPipeline):
    pass

"""Diffusers' own tests of its DiT pipeline, run on ours with our transformer; they need `parameterized` and
`requests-mock` installed."""

from tests.pipelines.dit import test_dit as upstream

from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.dit import MHLADiTPipeline


class TestPipeline(upstream.DiTPipelineFastTests):
    pipeline_class = MHLADiTPipeline

    def get_dummy_components(self):
        components = super().get_dummy_components()
        return components | {"transformer": convert(components["transformer"], block_grid=(2, 2), gate=True)}

    def test_inference(self):
        # Upstream compares with numbers of its softmax; the shape of the output is what can be asked of ours.
        pipe = self.pipeline_class(**self.get_dummy_components())
        pipe.set_progress_bar_config(disable=True)
        assert pipe(**self.get_dummy_inputs("cpu")).images.shape == (1, 16, 16, 3)

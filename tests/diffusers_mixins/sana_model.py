"""Diffusers' own tests of its SANA transformer, run on ours; `make test-diffusers DIFFUSERS_SRC=...`.

Its wheel holds no tests: they are taken from a checkout, whose root is on `PYTHONPATH`. The names of the files here
keep them out of the ordinary run.
"""

import pytest
from tests.models.testing_utils import (
    FirstBlockCacheTesterMixin,
    MagCacheTesterMixin,
    PyramidAttentionBroadcastTesterMixin,
    TaylorSeerCacheTesterMixin,
    TorchCompileTesterMixin,
)
from tests.models.transformers import test_models_transformer_sana as upstream

from mhla_diffusion.models.sana import MHLASanaTransformer2DModel

OPTIONS = {
    "num_layers": 2,
    "mhla_block_grid": (3, 2),
    "mhla_gate": True,
    "mhla_local_conv": 3,
    "mhla_norm_out": True,
}


class OnOurs:
    """Comes first among the bases: our class, with everything that it can have."""

    @property
    def model_class(self):
        return MHLASanaTransformer2DModel

    def get_init_dict(self) -> dict:
        return super().get_init_dict() | OPTIONS


class TestModel(OnOurs, upstream.TestSanaTransformer):
    pass


class TestMemory(OnOurs, upstream.TestSanaTransformerMemory):
    pass


class TestTraining(OnOurs, upstream.TestSanaTransformerTraining):
    def test_gradient_checkpointing_is_applied(self):
        super(upstream.TestSanaTransformerTraining, self).test_gradient_checkpointing_is_applied(
            expected_set={"MHLASanaTransformer2DModel"}
        )


class TestAttention(OnOurs, upstream.TestSanaTransformerAttention):
    def test_attention_processor_dict(self):
        with pytest.raises(ValueError, match="restore"):  # a foreign processor would take MHLA away
            super().test_attention_processor_dict()


class TestLoRA(OnOurs, upstream.TestSanaTransformerLoRA):
    def test_logs_info_when_no_lora_keys_found(self):
        with pytest.raises(ValueError, match="have no place"):  # where Diffusers writes to its log
            super().test_logs_info_when_no_lora_keys_found()

    def test_lora_missing_keys_warning(self, tmp_path):
        with pytest.raises(
            ValueError, match="its other half is missing"
        ):  # where Diffusers draws it at random
            super().test_lora_missing_keys_warning(tmp_path)


class TestCompile(OnOurs, upstream.SanaTransformerTesterConfig, TorchCompileTesterMixin):
    pass


class TestFirstBlockCache(OnOurs, upstream.SanaTransformerTesterConfig, FirstBlockCacheTesterMixin):
    pass


class TestMagCache(OnOurs, upstream.SanaTransformerTesterConfig, MagCacheTesterMixin):
    pass


class TestTaylorSeerCache(OnOurs, upstream.SanaTransformerTesterConfig, TaylorSeerCacheTesterMixin):
    pass


class TestPyramidAttentionBroadcast(
    OnOurs, upstream.SanaTransformerTesterConfig, PyramidAttentionBroadcastTesterMixin
):
    pass

"""What Diffusers' own tests of a model need to run on ours; `tests/diffusers_mixins` has a file for each family.

Each class comes first among the bases of a test class. Where ours does another thing than upstream asks for, on
purpose, the test says what.
"""

import pytest
import torch
from tests.models.testing_utils import TrainingTesterMixin


class OnOurs:
    """A family's file names the class, with everything that it can have, and a processor of others' attention."""

    ours: type
    options: dict
    foreign: type

    @property
    def model_class(self):
        return self.ours

    def get_init_dict(self) -> dict:
        return super().get_init_dict() | self.options


class CheckpointingOfOurs:
    def test_gradient_checkpointing_is_applied(self):
        TrainingTesterMixin.test_gradient_checkpointing_is_applied(self, expected_set={self.ours.__name__})


class NoForeignProcessors:
    def test_attention_processor_dict(self):
        # Upstream puts other processors everywhere, which would quietly undo MHLA: ours says no.
        ours = self.model_class(**self.get_init_dict())
        with pytest.raises(ValueError, match="restore"):
            ours.set_attn_processor({name: self.foreign() for name in ours.attn_processors})


class NoUnusedLoRA:
    def test_logs_info_when_no_lora_keys_found(self):
        # Upstream wants a log line; ours refuses a LoRA of which nothing would be used.
        ours = self.model_class(**self.get_init_dict())
        with pytest.raises(ValueError, match="have no place"):
            ours.load_lora_adapter({"lora_foo": torch.tensor(2.0)}, prefix="transformer")

    def test_lora_missing_keys_warning(self, tmp_path):
        with pytest.raises(
            ValueError, match="its other half is missing"
        ):  # where Diffusers draws it at random
            super().test_lora_missing_keys_warning(tmp_path)

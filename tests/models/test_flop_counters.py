"""PyTorch's counter of floating-point operations sees into our models, on sizes alone as well as on values."""

import pytest
import tiny_dit
import tiny_sana
import tiny_sana_video
import tiny_wan
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusion.models.convert import convert

FAMILIES = {"DiT": tiny_dit, "SANA": tiny_sana, "SANA-Video": tiny_sana_video, "Wan": tiny_wan}


def counted(family, device: str, **options) -> tuple[int, int, int]:
    """Operations of a forward pass without gradients, of one with them, and of its backward pass."""
    model = convert(family.stock_transformer(), gate=True, local_conv=3, **options).to(device)
    inputs = {name: x.to(device) for name, x in family.transformer_inputs().items()}
    with torch.no_grad(), FlopCounterMode(display=False) as alone:
        model(**inputs)
    with FlopCounterMode(display=False) as forward:
        out = model(**inputs).sample
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return tuple(counter.get_total_flops() for counter in (alone, forward, backward))


@pytest.mark.filterwarnings("ignore:the token grid holds only")
@pytest.mark.parametrize("name", FAMILIES)
def test_work_is_counted_on_the_meta_device_with_weights_that_train(name):
    alone, forward, backward = counted(FAMILIES[name], "meta")
    assert 0 < alone == forward < backward
    if name == "DiT":  # no cross-attention, which is one call on the CPU that the counter does not see into
        assert (alone, forward, backward) == counted(FAMILIES[name], "cpu")


def test_a_matrix_that_is_interpolated_is_counted_too():
    with pytest.warns(UserWarning, match="the token grid holds only"):
        alone, forward, _ = counted(tiny_dit, "meta", block_grid=(9, 2))
    assert 0 < alone == forward

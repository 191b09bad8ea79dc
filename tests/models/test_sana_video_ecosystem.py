"""What Diffusers users do with a SANA-Video transformer, beside what test_ecosystem.py asks of each family."""

import pytest
import torch
from diffusers import SanaVideoPipeline
from model_checks import relative, stirred
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tiny_sana_video import EVERYTHING, model, run, stock_transformer, transformer_inputs

from mhla_diffusion.models.convert import convert

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
HYBRID = {"mhla_layers": [1], **EVERYTHING}


@torch.no_grad()
def test_a_lora_made_on_the_stock_model_attaches_fully(tmp_path):
    stock = stock_transformer()
    stock.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=TARGETS))
    for number, (name, parameter) in enumerate(stock.named_parameters()):
        if "lora_" in name:
            parameter.normal_(generator=torch.Generator().manual_seed(number))
    made = get_peft_model_state_dict(stock)
    SanaVideoPipeline.save_lora_weights(tmp_path, transformer_lora_layers=made)
    expected = run(stock)
    for ours in (model(mhla_layers=[]), convert(stock_transformer(), (1, 1, 1))):
        without = run(ours)
        pipe = SanaVideoPipeline(None, None, None, ours, None)
        pipe.load_lora_weights(tmp_path)
        attached = {name: p for name, p in ours.named_parameters() if "lora_" in name}
        assert len(made) == len(attached) == 2 * 16 and all(p.any() for p in attached.values())
        assert relative(run(ours), without) > 1e-3 and relative(run(ours), expected) < 1e-5
        pipe.unload_lora_weights()
        assert torch.equal(run(ours), without)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("options", [HYBRID, {}])
@pytest.mark.parametrize("size", [(5, 8, 12), (7, 10, 14)])
def test_on_the_gpu_every_precision_is_close_to_float32_on_the_cpu(options, size):
    ours = stirred(convert(stock_transformer(), (2, 2, 3)) if not options else model(**options))
    expected = run(ours, **transformer_inputs(size=size))
    for dtype, near in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2), (torch.float16, 3e-2)):
        ours.to("cuda", dtype)
        inputs = {name: x.to("cuda") for name, x in transformer_inputs(size=size, dtype=dtype).items()}
        assert relative(run(ours, **inputs).cpu().float(), expected) < near

"""Resizes against the codes they are named after, and what pictures are refused."""

import numpy as np
import pytest
import torch

from mhla_diffusion.evaluation.networks.preparation import (
    as_uint8,
    pil_bicubic,
    prepare,
    tensorflow_bilinear,
    torch_bilinear,
)


def pictures(height: int, width: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(height * 1000 + width)
    return torch.randint(0, 256, (2, 3, height, width), generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (33, 300), (401, 256), (299, 299), (1, 1)])
def test_resizes_agree_with_the_codes_they_are_named_after(height, width):
    from cleanfid.resize import build_resizer
    from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

    x = pictures(height, width)
    theirs = interpolate_bilinear_2d_like_tensorflow1x(x.float(), (299, 299), align_corners=False)
    torch.testing.assert_close(tensorflow_bilinear(x, 299), theirs, rtol=0, atol=2e-3)
    # Pillow no longer takes the mode that clean-fid passes without a warning.
    clean = build_resizer("clean")
    with np.errstate(all="ignore"):
        expected = torch.stack(
            [torch.from_numpy(clean(one.permute(1, 2, 0).numpy())).permute(2, 0, 1) for one in x]
        )
    torch.testing.assert_close(pil_bicubic(x, 299), expected, rtol=0, atol=0)
    plain = torch.nn.functional.interpolate(x.float(), (299, 299), mode="bilinear", align_corners=False)
    torch.testing.assert_close(torch_bilinear(x, 299), plain, rtol=0, atol=0)


def test_protocols_scale_as_they_say():
    x = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    assert prepare(x, "fid_adm", 8).unique().tolist() == [127 / 128]
    assert prepare(x, "fid_pytorch", 8).unique().tolist() == [1.0]
    assert prepare(x * 0, "fid_clean", 8).unique().tolist() == [-1.0]
    with pytest.raises(ValueError, match="'fid': give fid_adm"):
        prepare(x, "fid", 8)


def test_floats_of_the_unit_interval_are_rounded():
    x = pictures(5, 7)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(as_uint8(x.to(dtype) / 255), x)
    assert as_uint8(torch.full((1, 3, 1, 1), 0.9 / 255)).unique().tolist() == [1]
    edges = torch.tensor([1 + 1e-6, -1e-7, 1 + 0.5 / 255]).reshape(1, 3, 1, 1)
    assert as_uint8(edges).flatten().tolist() == [255, 0, 255]
    assert torch.equal(as_uint8(x), x) and as_uint8(torch.zeros(0, 3, 4, 4)).dtype == torch.uint8


def test_what_cannot_be_pictures_is_refused():
    x = pictures(4, 4)
    with pytest.raises(ValueError, match=r"from 0 to 255: give \[0, 1\] \(x / 255"):
        as_uint8(torch.tensor([0.0, 255.0, 3.0]).reshape(1, 3, 1, 1))
    with pytest.raises(ValueError, match=r"\(x \+ 1\) / 2 maps \[-1, 1\]"):
        as_uint8(x / 127.5 - 1)
    with pytest.raises(ValueError, match=r"from 0 to 1.01: give"):
        as_uint8(torch.tensor([0.0, 1.01, 1.0]).reshape(1, 3, 1, 1))
    with pytest.raises(ValueError, match="not finite"):
        as_uint8(torch.full((1, 3, 2, 2), torch.nan))
    with pytest.raises(ValueError, match="three colours first"):
        as_uint8(x.permute(0, 2, 3, 1))
    with pytest.raises(ValueError, match="three colours first"):
        as_uint8(x[0])
    with pytest.raises(ValueError, match="torch.int64"):
        as_uint8(x.long())
    with pytest.warns(UserWarning, match="cast instead of multiplied"):
        as_uint8((x > 127).to(torch.uint8))

"""The speed program runs and names what it measured. How fast it is, is not asserted."""

import torch

from mhla_diffusion.evaluation.speed import main, operator_vs_sdpa


def test_everything_that_makes_a_timing_comparable_is_printed(capsys):
    result = operator_vs_sdpa((6, 7), (2, 3), heads=2, head_dim=8, repeats=1, backward=True)
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed and "scaled_dot_product_attention" in printed
    assert "(1, 42, 2, 8)" in printed and "float32" in printed and "eager: " in printed and "ratio" in printed
    row = result["forward+backward"]
    assert row["ratio"] == row["sdpa_ms"] / row["mhla_ms"] and result["ratio"] == result["forward"]["ratio"]
    assert result["sdpa_gflop"] == 4 * 2 * 42**2 * 8 / 1e9 and result["megabytes"] == 4 * 42 * 2 * 8 * 4 / 1e6


def test_program(capsys):
    main(
        "--grid 4 4 --block-grid 2 2 --heads 1 --head-dim 8 --repeats 1 --dtype bfloat16 --device cpu".split()
    )
    assert "bfloat16" in capsys.readouterr().out

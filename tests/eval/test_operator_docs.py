"""The operator's figures in the documentation are those of the result files."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "eval" / "results"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("operator_docs", ROOT / "eval" / "operator_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_guides_tables_are_the_result_files(program):
    page = program.PAGE.read_text(encoding="utf-8")
    assert [name for name in program.TABLES if f"<!-- {name} -->" not in page] == []
    assert program.filled(page) == page, "run python eval/operator_docs.py"


def test_a_stale_table_is_written_anew_and_the_text_stays(program):
    stale = "before\n<!-- counters -->\n| old |\n<!-- end -->\nafter <!-- end -->\n"
    page = program.filled(stale)
    assert page.startswith("before\n<!-- counters -->\n\n| shape |") and page.endswith(
        "\nafter <!-- end -->\n"
    )
    assert "old" not in page and "dual_forward" in page


def test_rows_name_every_target_and_what_is_not_timed(program):
    lines = program.rows().splitlines()
    assert len(lines) >= 2 + 13 and "<= 0.20 ms, >= 50x cuDNN, <= 140 MB" in lines[2]
    assert "per token within 10 % of the even grid" in program.rows()
    timed = {row["name"] for row in json.loads((RESULTS / "op_h200.json").read_text())["rows"]}
    for case in program.CASES:
        assert all(case.name in timed for line in lines if case.name in line and "not timed yet" not in line)


def test_the_readme_says_what_the_files_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {
        (row["name"], row["direction"]): row
        for row in json.loads((RESULTS / "op_h200.json").read_text())["rows"]
    }
    wan = [rows["wan 480x800x81", direction] for direction in ("forward", "forward_backward")]
    large = rows["wan 720p", "forward"]["ratio_vs_cudnn"]
    assert f"{wan[0]['ours_ms']:.3f} ms, {wan[0]['ratio_vs_cudnn']:.1f} x faster" in text
    assert (
        f"{wan[1]['ratio_vs_cudnn']:.1f} x forward and backward; at 720p (75,600 tokens) {large:.0f} x"
        in text
    )
    scaling = json.loads((RESULTS / "op_scaling_h200.json").read_text())["rows"]
    peers = scaling[0]["peers_ms"]
    assert (
        f"softmax takes {peers['SDPA cuDNN']:.3f} ms where ours takes {scaling[0]['ours_ms']:.3f}, and causal linear "
        f"attention of `fla` {peers['FLA chunked (causal)']:.3f}" in text
    )
    faster = [
        (
            row["shape"]["N"],
            [ms > row["ours_ms"] for ms in row["peers_ms"].values()],
            row["ratio_vs_cudnn"] > 1,
        )
        for row in scaling
    ]
    assert next(tokens for tokens, _, softmax in faster if softmax) == 2048
    assert next(tokens for tokens, all_peers, _ in faster if all(all_peers)) == 8192

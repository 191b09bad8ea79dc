import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusion.pipelines.requests import MAX_SEED, Request, check_size, match_seeds, read_prompts


def test_a_text_file_has_a_prompt_a_line_and_empty_lines_between_count(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeff a whale \r\n\r\nクジラ\n\n \n", encoding="utf-8")
    assert read_prompts(path) == ["a whale", "", "クジラ"]


def test_only_the_end_of_a_line_ends_a_prompt(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("a\u2028whale\r\nan\x0cowl\n\x85\n".encode())
    assert read_prompts(path) == ["a\u2028whale", "an\x0cowl"]


@pytest.mark.parametrize(
    "text", ['["a whale", "an owl"]', '[{"prompt": "a whale", "key": 1}, {"prompt": "an owl"}]']
)
def test_a_json_file_is_a_list_of_prompts(tmp_path, text):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    assert read_prompts(path) == ["a whale", "an owl"]


@pytest.mark.parametrize("text", ["", "{}", '"a"', "[1]", '[{"caption": "a"}]', '{"prompt": "a"}', "[", "3"])
def test_another_json_file_is_refused(tmp_path, text):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="JSON list of prompts|is empty"):
        read_prompts(path)


@given(st.integers(1, 9), st.integers(0, MAX_SEED))
def test_one_seed_serves_all(count, seed):
    assert match_seeds([seed], count) == match_seeds(seed, count) == [seed] * count


@given(st.integers(-50, 500), st.integers(1, 64))
def test_the_size_that_is_named_instead_is_right(value, multiple):
    if value > 0 and value % multiple == 0:
        check_size(value, value, multiple)
        return
    with pytest.raises(ValueError, match="--height") as error:
        check_size(value, multiple, multiple)
    named = [int(word) for word in str(error.value).split("--height ")[1].split(" or ")]
    assert all(size > 0 and size % multiple == 0 for size in named)
    assert min(abs(size - value) for size in named) <= max(multiple, multiple - value)


def test_a_request_knows_its_own_picture():
    request = Request(0, "a whale", 3, steps=None, guidance=2.0)
    defaults = {"steps": 20, "guidance": 4.5, "height": 64, "width": 64}
    asked = {"prompt": "a whale", "seed": 3, "guidance": 2.0, "dtype": "float32"}
    stored = defaults | asked | {"defaults": defaults, "pipeline_sha256": "a"}
    assert request.differences(stored, "a") == []
    assert request.differences(stored, "b") == ["other weights"]
    assert request.differences({}, "a") == ["other weights"]
    assert request.differences(stored | {"steps": 9, "seed": 4}, "a") == [
        "seed 4 there, 3 asked",
        "steps 9 there, 20 asked",
    ]

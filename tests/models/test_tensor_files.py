"""Weight files: which ones a folder holds, whether they are whole, and writing them tensor by tensor."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mhla_diffusion.models.tensor_files import (
    DTYPES,
    Entry,
    check_index,
    check_sum,
    find_index,
    is_finite,
    open_tensors,
    weight_files,
    write_safetensors,
)

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"


def shard(number: int, total: int = 2, stem: str = STEM) -> str:
    return f"{stem}-{number:05d}-of-{total:05d}.safetensors"


@pytest.fixture
def sharded(tmp_path):
    """Two shards with an index."""
    parts = [{"a": torch.ones(2), "b": torch.ones(3)}, {"c": torch.ones(4)}]
    for number, part in enumerate(parts, 1):
        save_file(part, tmp_path / shard(number))
    weight_map = {"a": shard(1), "b": shard(1), "c": shard(2)}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def refused(folder) -> str:
    with pytest.raises(ValueError) as caught:
        files = weight_files(folder)
        check_index([open_tensors(path) for path in files], find_index(files))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_map(folder, **changes) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {k: v for k, v in (index["weight_map"] | changes).items() if v is not None}
    (folder / INDEX).write_text(json.dumps(index))


def test_what_is_written_is_what_the_library_reads(tmp_path):
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for number, dtype in enumerate(DTYPES.values()):
        tensors[f"t{number}"] = (torch.rand(3, number + 1, generator=draw) * 9).to(dtype)
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "strided": torch.rand(4, 5).T}
    entries = [
        Entry(key, tuple(x.shape), x.dtype, lambda x=x: x) for key, x in reversed(list(tensors.items()))
    ]
    path = tmp_path / "a.safetensors"
    write_safetensors(path, entries)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for key, x in tensors.items():
        assert loaded[key].dtype == x.dtype and torch.equal(loaded[key], x)
    opened = open_tensors(path)
    assert opened.specs == {key: (tuple(x.shape), x.dtype) for key, x in tensors.items()}
    assert torch.equal(opened.read("strided"), tensors["strided"])
    save_file(
        {key: x.contiguous() for key, x in tensors.items()}, tmp_path / "b.safetensors", {"format": "pt"}
    )
    assert (tmp_path / "b.safetensors").stat().st_size == path.stat().st_size


def test_shards_come_in_order_and_agree_with_their_index(sharded):
    files = weight_files(sharded)
    assert [path.name for path in files] == [shard(1), shard(2)]
    check_index([open_tensors(path) for path in files], find_index(files))


def test_a_set_of_weights_is_chosen_by_its_variant(sharded):
    save_file({"a": torch.ones(2).half()}, sharded / f"{STEM}.fp16.safetensors")
    torch.save({"a": torch.ones(2)}, sharded / f"{STEM}.bin")
    assert [path.name for path in weight_files(sharded)] == [shard(1), shard(2)]
    assert [path.name for path in weight_files(sharded, "fp16")] == [f"{STEM}.fp16.safetensors"]
    with pytest.raises(ValueError, match="no weights of the variant bf16 .it has the variants fp16"):
        weight_files(sharded, "bf16")
    for name in (shard(1), shard(2), INDEX):
        (sharded / name).unlink()
    assert [path.name for path in weight_files(sharded)] == [f"{STEM}.bin"]
    (sharded / f"{STEM}.bin").unlink()
    assert [path.name for path in weight_files(sharded)] == [f"{STEM}.fp16.safetensors"]
    save_file({"a": torch.ones(2)}, sharded / shard(1, 1, f"{STEM}.bf16"))
    with pytest.raises(ValueError, match="variants bf16, fp16: choose one with --variant"):
        weight_files(sharded)


def test_shards_and_index_that_do_not_belong_together_are_named(sharded):
    change_map(sharded, c=shard(1))
    assert "which is" not in refused(sharded) and shard(2) in refused(sharded)  # a shard without any key
    change_map(sharded, c=shard(2), d=shard(2))
    assert f"has d in {shard(2)}, which does not hold it" in refused(sharded)
    change_map(sharded, d=None, b=shard(2))
    assert f"has b in {shard(2)}, which does not hold it" in refused(sharded)
    change_map(sharded, b=None)
    assert "does not name b" in refused(sharded)
    change_map(sharded, b=shard(1), e="../e.safetensors")
    assert "no file beside it" in refused(sharded)


def test_a_missing_or_surplus_shard_is_named(sharded):
    save_file({"z": torch.ones(1)}, sharded / shard(3, 3))
    assert f"{shard(3, 3)} is a shard that {INDEX} does not name" in refused(sharded)
    (sharded / shard(3, 3)).unlink()
    (sharded / shard(2)).rename(sharded / "kept")
    assert f"names {shard(2)}, which is missing" in refused(sharded)
    (sharded / "kept").rename(sharded / shard(2))
    save_file({"a": torch.ones(2), "c": torch.ones(4)}, sharded / shard(2))
    assert f"a is in {shard(1)} and in {shard(2)}" in refused(sharded)
    (sharded / INDEX).unlink()
    assert "no index of its shards" in refused(sharded)
    (sharded / INDEX).write_text('{"weight_map": {}}')
    assert "has no weight_map" in refused(sharded)
    (sharded / INDEX).write_text('{"weight_map": {"a": null}}')
    assert "has a in None, which is no file name" in refused(sharded)
    (sharded / INDEX).write_text("{")
    assert "not valid JSON" in refused(sharded)


def test_a_shard_that_is_not_whole_is_named(sharded):
    path = sharded / shard(2)
    whole = path.read_bytes()
    for content, message in ((b"", "0 bytes"), (whole[:-1], "cut short"), (whole[:5], "cut short")):
        path.write_bytes(content)
        assert message in refused(sharded) and str(path) in refused(sharded)


def test_a_folder_without_weights_or_with_too_many_is_refused(tmp_path):
    assert "holds no weights (.safetensors or .bin)" in refused(tmp_path)
    for name in ("model.safetensors", f"{STEM}.safetensors"):
        save_file({"a": torch.ones(1)}, tmp_path / name)
    assert "several weight files" in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F4"}, "type F4: give weights that are not quantised"),
        ({"dtype": None}, "type None"),
        ({"shape": [-1]}, "no readable safetensors header"),
        ({"shape": [2]}, "no readable safetensors header"),
        ({"shape": "x"}, "no readable safetensors header"),
        ({"data_offsets": [-3, 1]}, "no readable safetensors header"),
    ],
)
def test_quantised_files_and_headers_that_contradict_themselves_are_refused(tmp_path, change, message):
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} | change}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(ValueError, match=message) as caught:
        open_tensors(tmp_path / "a.safetensors")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_values_that_are_not_finite_are_seen_in_every_type(dtype):
    assert is_finite(torch.ones(3).to(dtype)) and is_finite(torch.ones(0).to(dtype))
    assert not is_finite(torch.tensor([1.0, torch.nan, 2.0]).to(dtype))


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.eye(2, dtype=torch.complex64)])
def test_tensors_that_cannot_be_stored_are_refused_by_name(tmp_path, tensor):
    torch.save({"a": torch.ones(1), "b.weight": tensor}, tmp_path / "a.pt")
    with pytest.raises(
        ValueError, match=r"holds b.weight as torch.\w+: give weights that are dense"
    ) as caught:
        open_tensors(tmp_path / "a.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("note", "line"),
    [
        ("{name}.sha256", "{sum}\n"),
        ("{name}.sha256", "{sum}  {name}\n"),
        ("SHA256SUMS", "{other}  other\n{sum} *./{name}\n"),
        (".cache/huggingface/download/{folder}{name}.metadata", "0123456789abcdef\n{sum}\n1700000000.0\n"),
    ],
)
@pytest.mark.parametrize("folder", ["", "transformer/"])
def test_a_checksum_on_record_is_compared(tmp_path, note, line, folder):
    path = tmp_path / folder / "weights.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({"a": torch.ones(9)}, path)
    assert check_sum(path) is False
    root = tmp_path if note.startswith(".cache") else path.parent
    place = root / note.format(name=path.name, folder=folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    value = hashlib.sha256(path.read_bytes()).hexdigest()
    text = line.format(sum=value.upper(), name=path.name, other="0" * 64)
    place.write_text(text)
    assert check_sum(path) is True
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # one bit, which neither size nor header shows
    path.write_bytes(content)
    with pytest.raises(ValueError, match="does not have the sha256 that") as caught:
        check_sum(path)
    assert str(place) in str(caught.value) and "\n" not in str(caught.value)


def test_a_link_to_a_blob_of_the_hubs_cache_names_its_checksum(tmp_path):
    save_file({"a": torch.ones(9)}, tmp_path / "x")
    value = hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    (tmp_path / "x").rename(tmp_path / value)
    (tmp_path / "w.safetensors").symlink_to(tmp_path / value)
    assert check_sum(tmp_path / "w.safetensors") is True
    (tmp_path / value).write_bytes(b"other")
    with pytest.raises(ValueError, match="the name of its blob"):
        check_sum(tmp_path / "w.safetensors")

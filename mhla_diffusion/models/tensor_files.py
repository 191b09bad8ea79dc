"""Weights in files: which files a model folder holds, whether they are whole, one tensor at a time in and out.

Reading maps files and writing goes tensor by tensor, so that a model never has to fit into memory.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..weights import check_safetensors, read_json
from .safe_pickle import load_pickle, state_of, unwrapped

__all__ = [
    "Entry",
    "TensorFile",
    "check_sum",
    "is_finite",
    "open_tensors",
    "weight_files",
    "write_safetensors",
]

# Names of types in a safetensors header.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHTS_NAME = "diffusion_pytorch_model"
WEIGHT_FILE = re.compile(
    r"(?P<name>[\w-]+?)(?:\.(?P<variant>\w+))?(?:-\d{5}-of-\d{5})?\.(?P<kind>safetensors|bin)"
)
INDEX_FILE = re.compile(r"[\w-]+\.(?:safetensors|bin)\.index(?:\.(?P<variant>\w+))?\.json")
AGAIN = "copy or download the folder again"


@dataclass
class TensorFile:
    """The tensors of one file: shape and dtype of each, and `read` for its values, mapped from the file.

    `close` lets the mapping of a pickled file go; nothing can be read afterwards.
    """

    path: Path
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    read: Callable[[str], torch.Tensor]
    close: Callable[[], None] = lambda: None
    taken_from: str = ""  # the entry of a pickled checkpoint that holds the weights


def open_tensors(path: Path, weights: str | None = None) -> TensorFile:
    """Open a .safetensors file or a pickled checkpoint.

    Args:
        weights: name of the entry of a pickled checkpoint; None: the average where there is one.

    Raises ValueError when the file is not whole or holds more than weights.
    """
    if path.suffix != ".safetensors":
        state, name = state_of(load_pickle(path), path, weights)
        for key, tensor in state.items():
            if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
                kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
                raise ValueError(
                    f"{path} holds {key} as {kind}: give weights that are dense and not quantised"
                )
        specs = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
        return TensorFile(path, specs, state.__getitem__, state.clear, name)
    if weights is not None:
        raise ValueError(f"{path} is no pickled checkpoint: it has no parts for --weights {weights}")
    check_safetensors(path)
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    strange = sorted({str(entry.get("dtype")) for entry in header.values()} - set(DTYPES))
    if strange:
        raise ValueError(f"{path} holds tensors of type {strange[0]}: give weights that are not quantised")
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{path} has no readable safetensors header ({' '.join(str(error).split())}): copy or download it again"
        ) from None

    def read(key: str) -> torch.Tensor:
        # Opened for each tensor: the mapping ends with the last tensor in use, so that one file's pages do not
        # stay while the next is read.
        with safe_open(path, framework="pt") as opened:
            return opened.get_tensor(name_of[key])

    name_of = unwrapped({key: key for key in header})
    specs = {
        key: (tuple(header[name]["shape"]), DTYPES[header[name]["dtype"]]) for key, name in name_of.items()
    }
    return TensorFile(path, specs, read)


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The weight files of a model folder in Diffusers' layout, in the order of their names.

    Args:
        variant: such as "fp16", for a folder that has several sets of weights.

    Raises ValueError when there are none or too many, or when an index and the files do not belong together.
    """
    found: dict[tuple[str | None, str], list[Path]] = {}
    for path in sorted(folder.iterdir()):
        match = WEIGHT_FILE.fullmatch(path.name)
        if match and path.is_file():
            found.setdefault((match["variant"], match["kind"]), []).append(path)
    indices = {}
    for path in sorted(folder.iterdir()):
        if match := INDEX_FILE.fullmatch(path.name):
            kind = "bin" if ".bin.index" in path.name else "safetensors"
            indices[match["variant"], kind] = path
    sets = sorted({*found, *indices}, key=lambda key: (key[0] or "", key[1] == "bin"))
    named = [key for key in sets if key[0] == variant] if variant else sets
    if variant is None and any(key[0] is None for key in sets):
        named = [key for key in sets if key[0] is None]
    variants = sorted({key[0] for key in sets if key[0]})
    if not named:
        there = f" (it has the variants {', '.join(variants)})" if variants else ""
        wanted = f"weights of the variant {variant}" if variant else "weights (.safetensors or .bin)"
        raise ValueError(f"{folder} holds no {wanted}{there}: {AGAIN}")
    if len({key[0] for key in named}) > 1:
        raise ValueError(f"{folder} holds the variants {', '.join(variants)}: choose one with --variant")
    chosen = named[0]  # safetensors before pickles
    return belonging(folder, found.get(chosen, []), indices.get(chosen))


def belonging(folder: Path, files: list[Path], index: Path | None) -> list[Path]:
    """The files of one set of weights, checked against its index, if any."""
    whole = [path for path in files if "-of-" not in path.name]
    shards = [path for path in files if "-of-" in path.name]
    if index is None:
        if shards:
            raise ValueError(
                f"{folder} holds {shards[0].name} but no index of its shards (.index.json): {AGAIN}"
            )
        if len(whole) > 1:
            names = ", ".join(path.name for path in whole)
            raise ValueError(
                f"{folder} holds several weight files ({names}) and no index: keep the one that counts"
            )
        return whole
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map: {AGAIN}")
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise ValueError(f"{index} has {key} in {name!r}, which is no file name: {AGAIN}")
    listed = sorted(set(weight_map.values()))
    for name in listed:
        if os.path.basename(name) != name:
            raise ValueError(f"{index} names {name!r}, which is no file beside it: {AGAIN}")
        if not (folder / name).is_file():
            raise ValueError(f"{index} names {name}, which is missing: {AGAIN}")
    for path in shards:
        if path.name not in listed:
            raise ValueError(f"{path} is a shard that {index.name} does not name: {AGAIN}")
    return [folder / name for name in listed]


def check_index(files: Sequence[TensorFile], index: Path | None) -> None:
    """Raise ValueError unless the shards hold the tensors that the index says, each once."""
    place: dict[str, str] = {}
    for file in files:
        for key in file.specs:
            if key in place:
                raise ValueError(f"{key} is in {place[key]} and in {file.path.name}: {AGAIN}")
            place[key] = file.path.name
    if index is None:
        return
    weight_map = read_json(index)["weight_map"]
    for key, name in weight_map.items():
        if place.get(key) != name:
            raise ValueError(f"{index} has {key} in {name}, which does not hold it: {AGAIN}")
    extra = sorted(set(place) - set(weight_map))
    if extra:
        raise ValueError(f"{index} does not name {extra[0]}, which {place[extra[0]]} holds: {AGAIN}")


def find_index(files: Sequence[Path]) -> Path | None:
    """The index that belongs to a set of shards; None for a single file without one."""
    for path in files[0].parent.iterdir() if files else ():
        if INDEX_FILE.fullmatch(path.name):
            weight_map = read_json(path).get("weight_map")
            if isinstance(weight_map, dict) and files[0].name in weight_map.values():
                return path
    return None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither infinite values nor NaN; takes no memory of its size."""
    # The smallest types have no comparisons.
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    return not tensor.numel() or bool(torch.stack(values.aminmax()).isfinite().all())


HEX = re.compile(r"[0-9a-fA-F]{64}")


def expected_sums(path: Path) -> Iterable[tuple[str, str]]:
    """Each sha256 on record for a file beside it, and where it is: checksum lists, and the Hub's own notes."""
    lists = [path.with_name(path.name + end) for end in (".sha256", ".sha256sum")]
    lists += [
        path.with_name(name) for name in ("SHA256SUMS", "sha256sums.txt", "SHA256SUMS.txt", "checksums.txt")
    ]
    for listing in lists:
        if listing.is_file():
            for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
                words = line.split()
                own = len(words) == 1 and listing.name.startswith(path.name)
                if words and HEX.fullmatch(words[0]) and (own or words[-1].lstrip("*./") == path.name):
                    yield words[0].lower(), str(listing)
    for folder in path.parents:
        # `hf download --local-dir` keeps a note for each file; the second line of it is the sha256 of a big one.
        root = folder / ".cache" / "huggingface" / "download"
        note = root / path.parent.relative_to(folder) / f"{path.name}.metadata"
        if note.is_file():
            lines = note.read_text(encoding="utf-8", errors="replace").splitlines()
            if len(lines) > 1 and HEX.fullmatch(lines[1].strip()):
                yield lines[1].strip().lower(), str(note)
            break
    blob = path.resolve().name  # in the Hub's cache the file is a link to a blob named by its sha256
    if path.is_symlink() and HEX.fullmatch(blob):
        yield blob.lower(), "the name of its blob"


def check_sum(path: Path) -> bool:
    """Compare a file with the sha256 on record beside it; False when there is none.

    Raises ValueError when they differ.
    """
    found = list(expected_sums(path))
    if not found:
        return False
    with open(path, "rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    for expected, where in found:
        if actual != expected:
            raise ValueError(
                f"{path} does not have the sha256 that {where} says ({actual[:12]}... instead of "
                f"{expected[:12]}...): copy or download it again"
            )
    return True


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its key, shape and dtype, and what makes its values."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(path: Path, entries: Iterable[Entry]) -> None:
    """Write tensors one after the other; only one is in memory at a time."""
    # Wide types first, as the safetensors library does, keeps every tensor aligned to its own type.
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.key))
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for entry in ordered:
        end = start + entry.size
        header[entry.key] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in ordered:
            tensor = entry.make().detach().to(device="cpu", dtype=entry.dtype)
            if tuple(tensor.shape) != entry.shape:
                raise AssertionError(f"{entry.key}: {tuple(tensor.shape)} instead of {entry.shape}")
            file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))

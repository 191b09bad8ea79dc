"""What may lie in the repository: sizes, names, and nothing of anybody's machine."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".cff", ".yml", ".yaml", ".cfg", ""}
# Folders under which people keep their own files; a tracked file that names one works on one machine only.
MACHINE_PATH = re.compile(r"(?<![\w./~$}-])/(?:home|root|Users|mnt|opt|srv|work|workspace|scratch)/\w")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def texts() -> list[Path]:
    return [path for path in tracked() if path.suffix in TEXT]


def test_no_source_file_is_longer_than_400_lines():
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in tracked() if path.suffix == ".py"
    }
    package = ROOT / "mhla_diffusion"
    assert {str(path): n for path, n in lengths.items() if n > 400 and package in path.parents} == {}


def test_no_file_is_a_bag_of_unrelated_functions():
    bags = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [str(path) for path in tracked() if path.name in bags] == []


def test_no_package_folder_has_the_name_of_a_diffusers_pipeline():
    # Diffusers would record the classes in it as classes of its own pipeline module of that name.
    folders = {path.parent.name for path in tracked() if ROOT / "mhla_diffusion" in path.parents}
    assert folders.isdisjoint({"wan", "sana", "dit", "flux", "sana_video"})


def test_tests_are_no_package():
    assert [
        str(path) for path in tracked() if path.name == "__init__.py" and ROOT / "tests" in path.parents
    ] == []


def test_no_file_names_a_path_of_one_machine():
    assert MACHINE_PATH.search(" /home" + "/someone/x") and not MACHINE_PATH.search("https://a.b/home" + "/x")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in texts()
        if path.name != ".gitignore"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_no_unfinished_marks():
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    assert [str(path) for path in tracked() if path.suffix == ".py" and marks.search(path.read_text())] == []


def test_the_tracked_files_are_small_and_weights_are_safetensors_only():
    sizes = {path: path.stat().st_size for path in tracked()}
    assert sum(sizes.values()) < 34 * MIB
    weights = {path: size for path, size in sizes.items() if path.suffix == ".safetensors"}
    assert {str(path): size for path, size in weights.items() if size > 15 * MIB} == {}
    pickles = {".pt", ".pth", ".bin", ".pkl", ".ckpt"}
    assert [str(path) for path in sizes if path.suffix in pickles] == []
    for name, most in (("sana-mhla-emoji", 20), ("wan-mhla-emoji", 10)):
        shipped = sum(size for path, size in sizes.items() if ROOT / "pipelines" / name in path.parents)
        assert shipped <= most * MIB, name


def test_diffusers_own_tests_do_not_bring_its_checkout_along(tmp_path):
    """Their conftest puts the `src` beside its folder first: the checkout's own code would be tested with ours."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").touch()
    command = ["make", "-n", "test-diffusers", f"DIFFUSERS_SRC={tmp_path}", f"OUT={tmp_path}/out"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    places = re.search(r'PYTHONPATH="([^"]+)"', said)[1].split(":")
    assert places == [f"{tmp_path}/out/diffusers", "tests/support"]
    assert f'ln -sfn "{tmp_path}/tests" {tmp_path}/out/diffusers/tests' in said

"""The order of the package's parts: a lower one never imports a higher one, lazily or not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mhla_diffusion

PACKAGE = Path(__file__).resolve().parent.parent / "mhla_diffusion"
# Parts of equal rank may import each other, except training and evaluation, which must stay independent.
RANK = {
    "blocks": 0,
    "building": 0,
    "mixing": 0,
    "weights": 0,
    "provenance": 0,
    "folders": 0,
    "ops": 1,
    "attention": 2,
    "wan_attention": 2,
    "sana_video_attention": 2,
    "feed_forward": 2,
    "models": 3,
    "pipelines": 4,
    "loading": 4,
    "training": 5,
    "evaluation": 5,
    "environment": 6,
    "cli": 7,
}
INDEPENDENT = [("training", "evaluation"), ("evaluation", "training")]
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[str]:
    """Absolute dotted names of everything that a file imports, inside functions too."""
    package = ("mhla_diffusion", *path.relative_to(PACKAGE).parts[:-1])
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from mhla_diffusion import ops` imports a part, so the imported name counts too.
            names += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "mhla_diffusion":
                names.append(f"mhla_diffusion.{node.attr}")
    return names


def forbidden_imports(part: str, modules: list[str]) -> list[str]:
    found = []
    for module in modules:
        root, _, name = module.partition(".")
        if root != "mhla_diffusion" or name in ("", "__version__"):
            continue
        # A name that the root exports counts as the part that it comes from.
        home = mhla_diffusion._HOME_OF.get(name, module)
        other = home.removeprefix("mhla_diffusion.").partition(".")[0]
        if other not in RANK or RANK[other] > RANK[part] or (part, other) in INDEPENDENT:
            found.append(module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_part_imports_only_its_own_rank_and_below(path):
    part = part_of(path)
    assert part in RANK, f"{part} has no place in the order: add it to RANK"
    assert forbidden_imports(part, imported_modules(path)) == []


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if part_of(path) in ("blocks", "mixing", "weights", "provenance", "ops")],
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_the_foundation_imports_only_torch_and_triton(path):
    allowed = {"mhla_diffusion", "torch", "triton", *sys.stdlib_module_names}
    assert {module.partition(".")[0] for module in imported_modules(path)} <= allowed


def test_the_checker_sees_relative_lazy_and_plain_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    source = tmp_path / "ops" / "eager.py"
    source.parent.mkdir()
    source.write_text(
        "from ..blocks import block_table\n"
        "from mhla_diffusion import attention\n"
        "def f():\n    import mhla_diffusion.models.sana\n    from .. import cli\n"
    )
    assert forbidden_imports("ops", imported_modules(source)) == [
        "mhla_diffusion.attention",
        "mhla_diffusion.models.sana",
        "mhla_diffusion.cli",
    ]
    source.write_text("from mhla_diffusion.evaluation.features import x\n")
    assert forbidden_imports("training", imported_modules(source)) == ["mhla_diffusion.evaluation.features.x"]
    source.write_text("import mhla_diffusion\nmhla_diffusion.load_pipeline('a')\n")
    assert forbidden_imports("models", imported_modules(source)) == ["mhla_diffusion.load_pipeline"]
    assert forbidden_imports("training", imported_modules(source)) == []


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_the_operator_runs_without_diffusers_transformers_and_triton():
    result = run_python(
        "import sys\n"
        "for name in ('diffusers', 'transformers', 'accelerate', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from mhla_diffusion.ops import mhla_attention\n"
        "q = torch.rand(1, 16, 2, 4)\n"
        "out = mhla_attention(q, q, q, torch.eye(4), grid=(4, 4), block_grid=(2, 2))\n"
        "print(tuple(out.shape))\n"
    )
    assert result.stdout.strip() == "(1, 16, 2, 4)", result.stderr


def test_importing_the_package_imports_neither_triton_nor_its_own_heavy_parts():
    result = run_python(
        "import sys, mhla_diffusion\n"
        "heavy = ('triton', 'transformers.models.gemma2', 'mhla_diffusion.models',\n"
        "         'mhla_diffusion.pipelines', 'mhla_diffusion.training', 'mhla_diffusion.evaluation')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    assert result.stdout.strip() == "[]", result.stderr

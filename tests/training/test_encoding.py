"""A data set becomes latents batch by batch: the same numbers as all at once, a bar that counts, clean captions."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from mhla_diffusion.training import latents as latents_module
from mhla_diffusion.training.buckets import Bucket, PictureSource
from mhla_diffusion.training.config import DataConfig
from mhla_diffusion.training.data import open_source
from mhla_diffusion.training.latents import cleaned, encode_pixels, encode_source
from mhla_diffusion.training.moving_emoji import MovingEmoji
from mhla_diffusion.training.tensor_file import TensorsInMemory

SAMPLE = Path(__file__).resolve().parents[2] / "assets" / "emoji_sample.tar"


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    model = AutoencoderKLWan(
        base_dim=4, z_dim=3, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[True, True],
        latents_mean=[0.1, -0.2, 0.3], latents_std=[0.5, 1.0, 2.0],
    )  # fmt: skip
    return model.eval().requires_grad_(False)


def clips_source(clips: int) -> PictureSource:
    config = DataConfig(
        kind="moving-emoji", path=str(SAMPLE), sizes=[[5, 16, 16], [1, 16, 16]], clips=clips, styles=["flat"]
    )
    return open_source(config, 4, seed=0, frame_factor=4)


def encode(source: PictureSource, vae, unit: str = "picture"):
    out = TensorsInMemory()
    captions = encode_source(source, vae, 2, out, unit)
    return out.tensors(), captions


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_latents_are_those_of_the_clips(vae, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    latents, captions = encode(clips_source(5), vae, "clip")
    shown = sys.stderr.getvalue()
    assert "encoding" in shown and "10/10" in shown and ("clip/s" in shown or "s/clip" in shown)
    direct = MovingEmoji(SAMPLE, seed=0, styles=["flat"])
    for place, size in enumerate(((5, 16, 16), (1, 16, 16))):
        numbers = range(5 * place, 5 * place + 5)
        pixels, plans = direct.clips(numbers, size)
        assert captions[place] == [[plan.caption] for plan in plans]
        images = pixels.float() / 127.5 - 1
        mean, std = (
            torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std)
        )
        parts = [(vae.encode(part).latent_dist.mode() - mean) / std for part in images.split(2)]
        assert latents[str(place)].dtype == torch.float32
        assert torch.equal(latents[str(place)], torch.cat(parts))
    assert list(latents) == ["0", "1"]


def test_no_bar_where_nobody_watches(vae, capfd):
    encode(clips_source(2), vae)
    assert capfd.readouterr().err == ""


def test_what_cannot_be_read_leaves_no_gap(vae):
    pixels = torch.randint(0, 255, (5, 3, 1, 8, 8), dtype=torch.uint8)

    def read(indices):
        kept = [i for i in indices if i not in (1, 4)]
        return pixels[kept], kept

    empty = Bucket(8, 8, [["nothing"]], lambda indices: (pixels[:0], []))
    source = PictureSource(lambda: [empty, Bucket(8, 8, [[str(i)] for i in range(5)], read)], "")
    latents, captions = encode(source, vae)
    assert captions == [[["0"], ["2"], ["3"]]] and list(latents) == ["0"]
    for row, index in zip(latents["0"], (0, 2, 3), strict=True):
        assert torch.allclose(row[None], encode_pixels(vae, pixels[index][None]), atol=1e-6)
    with pytest.raises(ValueError, match="none of the files can be read"):
        encode(PictureSource(lambda: [empty], ""), vae)


def test_clean_captions_are_what_the_pipeline_makes_of_them():
    plans = MovingEmoji(SAMPLE, seed=0, styles=["flat", "noto"]).plans(range(300))
    texts = {plan.caption for plan in plans} | {
        "", " ", "a  cat", " a cat", "a cat ", "a\ncat", "a &amp; b", "a&lt;b", "it's a well-known cat, 3.5", "ﬁsh",
        "schÃ¶n", "“cat”", "a\u00a0cat", "a\x1b[31mcat", "UPPER Case",
    }  # fmt: skip
    assert all(cleaned(text, True) == prompt_clean(text) for text in texts)
    assert cleaned(" A Cat ", False) == "a cat"


FILLS = """
import sys, time
from pathlib import Path
from mhla_diffusion.training.latents import _kept

def fill(folder):
    (folder / "value").write_text("made")
    time.sleep(0.5)
    with open(sys.argv[2], "a") as file:
        file.write("made\\n")

print(_kept(Path(sys.argv[1]), lambda folder: (folder / "value").read_text(), fill, "latents"))
"""


def test_processes_that_want_the_same_latents_wait_for_the_first(tmp_path):
    """As twins on several GPUs do: one of them encodes, and none finds a folder that another is just replacing."""
    command = [sys.executable, "-c", FILLS, str(tmp_path / "cache" / "key"), str(tmp_path / "log")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == ["made", "made"]
    assert (tmp_path / "log").read_text() == "made\n"


@pytest.mark.filterwarnings("error")
def test_a_cache_that_cannot_be_written_to_is_read(tmp_path, monkeypatch):
    (tmp_path / "key").mkdir()
    monkeypatch.setattr(latents_module, "one_at_a_time", None)
    assert latents_module._kept(tmp_path / "key", lambda folder: folder.name, None, "latents") == "key"

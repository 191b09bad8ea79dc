"""Sets of pictures and a decoder for runs that break off."""

import pytest
from broken_off import Decoder, draw_folders

from mhla_diffusion.evaluation import passes


@pytest.fixture
def kept_after_every_batch(monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)
    monkeypatch.delenv("MHLA_PROTOCOLS", raising=False)
    monkeypatch.setattr(passes, "EVERY", 0.0)
    monkeypatch.setattr(passes, "SHARE", 0)


@pytest.fixture
def folders(tmp_path, kept_after_every_batch):
    return draw_folders(tmp_path)


@pytest.fixture
def decoder(monkeypatch):
    return Decoder(monkeypatch)

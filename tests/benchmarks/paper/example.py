"""The paper's model and its text, from the examples."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from paper_model import PaperModel, SelectiveLayer, text

__all__ = ["PaperModel", "SelectiveLayer", "text"]

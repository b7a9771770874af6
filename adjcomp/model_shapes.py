"""Models that the command line knows by name, by a Python function, or by a saved configuration.

An unknown name is refused before torch is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Inputs = tuple[Any, ...] | dict[str, Any]
MakeInputs = Callable[[int, int], Inputs]  # (batch_size, seq_len) -> arguments of one call


@dataclass(frozen=True)
class Shape:
    """Sizes of a published model. All have an expansion of 2, convolutions of 4 steps and tied embeddings."""

    family: str  # "mamba" or "mamba2"
    width: int  # d_model
    layers: int


# Published sizes; mamba: state 16, vocabulary 50,280; mamba2: state 128, heads of 64, one group, vocabulary 50,288.
SHAPES: dict[str, Shape] = {
    "mamba-130m": Shape("mamba", 768, 24),
    "mamba-370m": Shape("mamba", 1024, 48),
    "mamba-790m": Shape("mamba", 1536, 48),
    "mamba-1.4b": Shape("mamba", 2048, 48),
    "mamba-2.8b": Shape("mamba", 2560, 64),
    "mamba2-130m": Shape("mamba2", 768, 24),
    "mamba2-1.3b": Shape("mamba2", 2048, 48),
    "mamba2-2.7b": Shape("mamba2", 2560, 64),
}


@dataclass(frozen=True)
class FoundModel:
    """A model, and how to make arguments for it where forward isn't `(input_ids, labels)`."""

    model: torch.nn.Module
    make_inputs: MakeInputs | None = None


def find_model(text: str, *, device: str, dtype: str, layers: int | None = None) -> FoundModel:
    """The model that `text` names: a published shape, "module:function", or a folder with a transformers config.json.

    device, dtype ("bfloat16"), layers: of a model that is built here; a function decides for itself. "meta" makes no weights. A
    function returns a model, or a model and a function from batch size and sequence length to the arguments of a call.

    Raises:
        ValueError: no such model. ImportError: transformers or the module is not installed.
    """
    if text in SHAPES:
        return FoundModel(_build(_config(SHAPES[text]), device, dtype, layers))
    if ":" in text:
        return _from_function(text)
    if (Path(text) / "config.json").is_file():
        return FoundModel(_build(_transformers().AutoConfig.from_pretrained(text), device, dtype, layers))
    known = ", ".join(SHAPES)
    raise ValueError(f"unknown model {text!r}; known: {known}; or module:function, or a folder with a transformers config.json")


def _config(shape: Shape) -> Any:
    """The transformers configuration of a published shape."""
    library = _transformers()
    sizes = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "expand": 2,
        "conv_kernel": 4,
        "tie_word_embeddings": True,
    }
    if shape.family == "mamba":
        return library.MambaConfig(**sizes, vocab_size=50_280, state_size=16)
    heads = 2 * shape.width // 64
    return library.Mamba2Config(**sizes, vocab_size=50_288, state_size=128, head_dim=64, num_heads=heads, n_groups=1)


def _build(config: Any, device: str, dtype: str, layers: int | None) -> torch.nn.Module:
    import torch

    if layers is not None:
        config.num_hidden_layers = layers
    config.use_cache = False
    with torch.device(device):
        model: torch.nn.Module = _transformers().AutoModelForCausalLM.from_config(config)
    return model.to(getattr(torch, dtype)).train()


def _transformers() -> Any:
    """The transformers library, quiet."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module="transformers.*")
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError("models by name need transformers: pip install 'adjcomp[hf]'") from error


def _from_function(text: str) -> FoundModel:
    import torch

    module_name, _, function_name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    finally:
        sys.path.remove(os.getcwd())
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{text!r}: module {module_name} has no function {function_name!r}")
    made = function()
    model, make_inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{text!r} must return a torch.nn.Module (or a pair of one and a function), not {type(model).__name__}")
    return FoundModel(model, make_inputs)

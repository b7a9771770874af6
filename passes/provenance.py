"""Where each traced node comes from (module path, source line), and refusal of what a trace would silently lose.

`make_fx` sees tensors only. While the model runs, this notes the module on top and the user's source line for every new node,
marks nodes made under `no_grad`, and raises CaptureError for autograd's side channels: `Tensor.register_hook`, custom
`autograd.Function`s, hooks on inner modules.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

import adjcomp.ops
from adjcomp.errors import CaptureError
from adjcomp.passes import attention

_REFUSED = {
    torch.Tensor.register_hook: "Tensor.register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "Tensor.register_post_accumulate_grad_hook",
    torch.Tensor.backward: "Tensor.backward",
    torch.autograd.grad: "torch.autograd.grad",
    torch.Tensor.item: "Tensor.item",
    torch.Tensor.tolist: "Tensor.tolist",
}
_HOOK_FIELDS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def refuse_modules(model: torch.nn.Module) -> None:
    """CaptureError for a module of a kind that no tile can hold, and for hooks on inner modules, which would be skipped.

    Hooks on the root module run around the compiled call.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.RNNBase):
            raise CaptureError(
                f"module {name!r} ({type(module).__name__}) is a recurrence that is not linear in its state: it has no "
                "chunked form here. Recurrences that have one are in adjcomp.ops"
            )
        if name and any(_lasting(getattr(module, field)) for field in _HOOK_FIELDS):
            raise CaptureError(
                f"module {name!r} ({type(module).__name__}) has forward or backward hooks: they would not run inside tiles. "
                "Remove them, or register them on the root module or on parameters"
            )


# Of transformers: one marks embeddings as wanting a gradient, the other collects what layers return for the model's own output,
# which the trace sees.
_HARMLESS = ("make_inputs_require_grads", "output_capturing_hook")


def _lasting(hooks: Mapping[int, Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Hooks other than those that do nothing beside what is traced."""
    return [hook for hook in hooks.values() if getattr(hook, "__name__", "") not in _HARMLESS]


class Provenance:
    """Records, for the nodes of the trace in progress, their module path and source line."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.stack: list[str] = []
        self.place = "before the first operation"
        self.operating = False  # whether an operation runs now, rather than the model's own code

    def last_place(self) -> str:
        """Module path and source line of the operation that ran last."""
        return self.place

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Attribute everything the model does to its modules, and refuse custom autograd Functions.

        Entered inside the traced function: the tracer itself replaces `Module.__call__` while it runs.
        """
        call, apply = torch.nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
        provenance = self

        def named_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = provenance.names.get(id(module))
            if name is None:
                return call(module, *args, **kwargs)
            provenance.stack.append(name)
            try:
                return call(module, *args, **kwargs)
            finally:
                provenance.stack.pop()

        def refuse_apply(function: type, *given: Any, **options: Any) -> Any:
            if function.__name__.startswith("GeneratedBackwardFor_"):  # of a torch.library op, which is one node of the trace
                return apply.__func__(function, *given, **options)
            if function is CheckpointFunction:  # recomputation is what the plan decides
                return given[0](*given[2:])
            raise CaptureError(
                f"{provenance.here()}: custom autograd.Function {function.__qualname__!r}: its backward is invisible "
                "to the trace. Write it with torch operations, or as a torch.library op with register_autograd"
            )

        without_reentrant = torch.utils.checkpoint._checkpoint_without_reentrant_generator
        torch.nn.Module.__call__ = named_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(refuse_apply)  # type: ignore[assignment, method-assign]
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = _no_checkpoint
        # Modules of torch call it by this name where no mode for torch functions sees it.
        torch.nn.functional.scaled_dot_product_attention = attention.attend_or_call
        try:
            with _Observer(self):
                yield
        finally:
            torch.nn.Module.__call__ = call  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            torch.utils.checkpoint._checkpoint_without_reentrant_generator = without_reentrant
            torch.nn.functional.scaled_dot_product_attention = attention.SCALED_DOT_PRODUCT

    def here(self) -> str:
        """The module path and the user's source line at this moment."""
        path = self.stack[-1] if self.stack else ""
        line = _user_line()
        return f"{path or 'the root module'}{f' ({line})' if line else ''}"


def _no_checkpoint(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Stands for the set-up of a checkpoint without reentry: the function inside is run as it is."""
    yield


class _Observer(TorchFunctionMode):
    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self.provenance = provenance

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REFUSED:
            raise CaptureError(f"{self.provenance.here()}: {_REFUSED[func]} inside forward cannot be captured")
        if func is torch.Tensor.requires_grad_:
            return args[0]  # what wants a gradient is decided outside of the trace
        self.provenance.place = self.provenance.here()
        self.provenance.operating = True
        try:
            known = attention.attend_or_call if func is attention.SCALED_DOT_PRODUCT else func
            return self._observe(known, args, kwargs or {})
        finally:
            self.provenance.operating = False

    def _observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        mode = get_proxy_mode()
        if mode is None:
            return func(*args, **kwargs)
        graph = mode.tracer.graph
        before = len(graph.nodes)
        result = func(*args, **kwargs)
        self._mark(graph, len(graph.nodes) - before)
        return result

    def _mark(self, graph: torch.fx.Graph, count: int) -> None:
        node = graph._root
        for _ in range(count):
            node = node.prev
            node.meta.setdefault("where", self.provenance.place)
            node.meta.setdefault("no_grad", not torch.is_grad_enabled())


_INTERNAL = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (os.path.dirname(torch.__file__), os.path.dirname(__file__), os.path.dirname(adjcomp.ops.__file__))
)


def _user_line() -> str | None:
    """File and line of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not os.path.realpath(name).startswith(_INTERNAL) and not name.startswith("<") and not name.endswith("contextlib.py"):
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None

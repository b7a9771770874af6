"""Which nodes make new storage and which look at another's, read off the op schemas."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def is_alias(node: fx.Node) -> bool:
    """Whether every output of `node` is a view of its first argument."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_alias(node.args[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.returns) and all(_views(entry) for entry in schema.returns)


def _views(entry: Any) -> bool:
    info = entry.alias_info
    return info is not None and not info.is_write


def storage_root(node: fx.Node) -> fx.Node:
    """The node whose storage `node` looks at: the end of its chain of views."""
    while node.op == "call_function" and is_alias(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_fresh(node: fx.Node) -> bool:
    """Whether a value was made in this graph for its one reader, who may write over it."""
    root = storage_root(node)
    while node is not root:
        if len(node.users) != 1:
            return False
        node = node.args[0]  # type: ignore[assignment]
    return root.op == "call_function" and len(root.users) == 1


def reads_part(node: fx.Node) -> bool:
    """Whether `node` picks one output of an op with several (no new storage of its own)."""
    return node.target is operator.getitem


def is_tensor(value: Any) -> bool:
    """Whether a fake value is one tensor."""
    return isinstance(value, torch.Tensor)


def is_alias_target(target: Any) -> bool:
    """Whether every output of an op is a view of its first argument, by its schema."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.returns) and all(_views(entry) for entry in schema.returns)


def writes_first_argument(target: Any) -> bool:
    """Whether an op's one output is its first argument, written in place."""
    schema = getattr(target, "_schema", None)
    info = None if schema is None or len(schema.returns) != 1 else schema.returns[0].alias_info
    return info is not None and bool(info.is_write)

"""Traversal of nested arguments and outputs: dicts, lists, tuples, namedtuples, dataclasses, model outputs.

torch's pytree knows only registered types. Here dataclasses and all mappings (such as a tokenizer's `BatchEncoding`)
are nodes too, so an output keeps its type even if its class is not registered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the named children of a node in order, or `None` if `tree` is a leaf.

    A name continues a path: `["key"]` for a mapping, `[0]` for a sequence, `.field` for a namedtuple or dataclass.
    """
    if isinstance(tree, torch.Tensor | torch.Size | str | bytes) or tree is None:
        return None
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", value) for name, value in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, list | tuple):
        return [(f"[{index}]", value) for index, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree) if field.init]
    if type(tree) in pytree.SUPPORTED_NODES:
        values, _ = pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)
        return [(f"[{index}]", value) for index, value in enumerate(values)]
    return None


def rebuild(tree: Any, values: Sequence[Any]) -> Any:
    """Return a node of `tree`'s type whose children, in the order of `children(tree)`, are `values`."""
    if isinstance(tree, Mapping):
        return rebuild_mapping(tree, dict(zip(tree, values, strict=True)))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*values)
    if isinstance(tree, list | tuple):
        return type(tree)(values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **dict(zip(names, values, strict=True)))
    node = pytree.SUPPORTED_NODES[type(tree)]
    return node.unflatten_fn(values, node.flatten_fn(tree)[1])


def rebuild_mapping(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of `tree`'s type. A dataclass (transformers' `ModelOutput`) takes keywords; others a dict."""
    if dataclasses.is_dataclass(tree):
        return type(tree)(**items)
    if type(tree) in pytree.SUPPORTED_NODES and type(tree) is not dict:
        node = pytree.SUPPORTED_NODES[type(tree)]
        return node.unflatten_fn(list(items.values()), node.flatten_fn(tree)[1])
    return type(tree)(items)  # type: ignore[call-arg]


IsLeaf: TypeAlias = Callable[[Any], bool]
"""Returns True for a node that is not entered."""


def _nodes(tree: Any, is_leaf: IsLeaf | None) -> list[tuple[str, Any]] | None:
    return None if is_leaf is not None and is_leaf(tree) else children(tree)


def map_leaves(fn: Callable[[str, Any], Any], tree: Any, path: str = "", is_leaf: IsLeaf | None = None) -> Any:
    """Return `tree` with `fn(path, leaf)` in place of each leaf.

    A node is made anew only where a leaf in it is another object: without any, the result is `tree` itself.
    """
    nodes = _nodes(tree, is_leaf)
    if nodes is None:
        return fn(path, tree)
    made = [map_leaves(fn, value, path + name, is_leaf) for name, value in nodes]
    return tree if all(new is old for new, (_, old) in zip(made, nodes, strict=True)) else rebuild(tree, made)


def leaves(tree: Any, path: str = "", is_leaf: IsLeaf | None = None) -> list[tuple[str, Any]]:
    """Return (path, leaf) for every leaf of `tree`, in order."""
    nodes = _nodes(tree, is_leaf)
    if nodes is None:
        return [(path, tree)]
    return [item for name, value in nodes for item in leaves(value, path + name, is_leaf)]

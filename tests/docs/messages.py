"""What the f-strings of a module can say, read from its source: `…` stands for what is known at run time alone."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

Texts = tuple[str, ...]


def messages(path: Path) -> set[str]:
    """Return every string that the module can make; names that a function has given a string are put in."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    known: dict[str, Texts] = {}
    found = set(_run(tree.body, known))
    for function in functions:
        found.update(_run(function.body, dict(known)))
    return found


def _run(body: Iterable[ast.stmt], known: dict[str, Texts]) -> Iterator[str]:
    """Yield the strings of statements in order, and keep in `known` what they assign."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue  # with names of its own
        blocks = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(statement, "handlers", [])]
        if any(blocks):
            for block in blocks:
                inner = dict(known)
                yield from _run(block, inner)
                # A branch may be taken or not.
                known |= {name: tuple(dict.fromkeys((*known.get(name, ()), *texts))) for name, texts in inner.items()}
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
                yield from _texts(node, known)
        if isinstance(statement, ast.Assign):
            for name, value in _pairs(statement):
                known[name] = _texts(value, known)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            known[name] = _joined(known.get(name, ("…",)), _texts(statement.value, known))
            yield from known[name]


def _pairs(statement: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    value = statement.value
    for target in statement.targets:
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        yield from ((one.id, given) for one, given in pairs if isinstance(one, ast.Name))


def _texts(node: ast.AST, known: dict[str, Texts]) -> Texts:
    if isinstance(node, ast.Constant):
        return (" ".join(node.value.split("\n")),) if isinstance(node.value, str) else ("…",)
    if isinstance(node, ast.JoinedStr):
        return _joined(*(_texts(value, known) for value in node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined(_texts(node.left, known), _texts(node.right, known))
    if isinstance(node, ast.IfExp):
        return (*_texts(node.body, known), *_texts(node.orelse, known))
    if isinstance(node, ast.FormattedValue):
        return _texts(node.value, known)
    return known.get(node.id, ("…",)) if isinstance(node, ast.Name) else ("…",)


def _joined(*parts: Texts) -> Texts:
    return tuple(map("".join, itertools.product(*parts)))

"""A table against a source: as ``contract.probe`` and ``probe_live``, without importing it."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator

from sglang_dynspec.engine.contract import (
    OBJECTS,
    Instance,
    Live,
    Name,
    inherited,
    lacking,
    signature_problems,
)

from .source import Definition, Function, NotInSourceError, Source, members
from .tables import Table

# Classes that are put together at import, from the classes of a package: their fields stand there.
_MADE_OF = {"sglang.srt.server_args:ServerArgs": "sglang.srt.arg_groups.fields"}


def problems(source: Source, table: Table) -> list[str]:
    """Hold all of a table against a source.

    Returns:
        A sentence for each mismatch; empty when all is as the table says.
    """
    found: list[str] = []
    for name in table.names:
        found += name_problems(source, name)
    for entry in table.live:
        found += _attribute_problems(source, entry)
    for instance in table.instances:
        found += _attribute_problems(source, instance)
    return list(dict.fromkeys(found))


def name_problems(source: Source, name: Name) -> list[str]:
    """Hold one name against a source."""
    try:
        found = source.find(name.path)
        wrong = lacking(name.path, _undeclared(source, name, found))
        if name.use == "wrap" and not _is_own(source, name):
            wrong += inherited(name)
        if name.use == "call" or name.parameters or name.keywords:
            wrong += signature_problems(name, source.signature(found))
    except NotInSourceError as error:
        return [f"{name.path} is not there ({error})"]
    return wrong


def fingerprints(source: Source, table: Table) -> dict[str, str]:
    """Short hashes of the functions that dynspec wraps or calls, as far as they are there.

    Docstrings, comments and annotations do not count, and neither does the version of Python that
    parses them.
    """
    bodies = {n.path: _function(source, n.path) for n in table.names if n.use != "read"}
    return {path: _hash(node) for path, node in sorted(bodies.items()) if node is not None}


def _attribute_problems(source: Source, entry: Live | Instance) -> list[str]:
    path = OBJECTS[entry.path] if isinstance(entry, Live) else entry.path
    what = f"{entry.path} ({path})" if isinstance(entry, Live) else entry.path
    try:
        found = source.find(path)
    except NotInSourceError as error:
        return [f"{what} is not there ({error})"]
    has = _declared(source, path, found) | source.assigned(found)
    return lacking(what, (field for field in entry.fields if field not in has))


def _undeclared(source: Source, name: Name, found: Definition) -> list[str]:
    has = _declared(source, name.path, found) if name.fields else set()
    return [field for field in name.fields if field not in has]


def _declared(source: Source, path: str, found: Definition) -> set[str]:
    package = _MADE_OF.get(path)
    return source.declared(found) | (source.annotated_in(package) if package else set())


def _is_own(source: Source, name: Name) -> bool:
    if "." not in name.path.partition(":")[2]:
        return True  # a name of a module, its own or imported: it is looked up there
    owner, _, attribute = name.path.rpartition(".")
    return attribute in members(source.find(owner).node)


def _function(source: Source, path: str) -> ast.AST | None:
    try:
        found = source.find(path)
    except NotInSourceError:
        return None
    for owner in source.lineage(found):
        if (init := members(owner.node).get("__init__")) is not None:
            return init
    return found.node if isinstance(found.node, Function) else None


def _hash(node: ast.AST) -> str:
    return hashlib.sha256("\n".join(_words(node)).encode()).hexdigest()[:12]


_IGNORED = {"ctx", "kind", "type_comment", "annotation", "returns"}


def _words(node: object) -> Iterator[str]:
    """A tree in words. ``ast.dump`` says more in one version of Python than in another."""
    if isinstance(node, ast.AST):
        if _is_docstring(node):
            return
        yield f"({type(node).__name__}"
        for field, value in ast.iter_fields(node):
            if field not in _IGNORED and value not in (None, []):
                yield field
                yield from _words(value)
        yield ")"
    elif isinstance(node, list):
        for item in node:
            yield from _words(item)
    else:
        yield repr(node)


def _is_docstring(node: ast.AST) -> bool:
    constant = node.value if isinstance(node, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)

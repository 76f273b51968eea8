"""The Python source of a distribution, in a wheel or a folder, looked up without importing it."""

from __future__ import annotations

import ast
import inspect
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef


class NotInSourceError(Exception):
    """A module or a name is not there."""


@dataclass(frozen=True, slots=True)
class Definition:
    """What a name stands for.

    Attributes:
        module: the module that defines it, which may be another one than it was asked for in.
        node: its class, its function, or the statement that assigns it.
    """

    module: str
    node: ast.AST


class Source:
    """Modules and their names.

    Args:
        root: a wheel, or a folder with packages in it.
    """

    def __init__(self, root: Path) -> None:
        # Both answer to joinpath, is_file and read_text.
        self._root: Any = zipfile.Path(zipfile.ZipFile(root)) if root.is_file() else root
        self._bindings: dict[str, dict[str, ast.AST]] = {}

    def find(self, path: str) -> Definition:
        """Look up ``module:qualified.name``, through imports and base classes.

        Raises:
            NotInSourceError: it is not there, or not in plain sight.
        """
        module, _, qualname = path.partition(":")
        first, *rest = qualname.split(".")
        found = self._in_module(module, first)
        for part in rest:
            found = self._in_class(found, part)
        return found

    def has_module(self, module: str) -> bool:
        return self._file(module) is not None

    def lineage(self, found: Definition) -> Iterator[Definition]:
        """A class and its bases, as far as they are in this source, each once, nearest first."""
        waiting, seen = [found], set()
        while waiting:
            current = waiting.pop(0)
            if not isinstance(current.node, ast.ClassDef) or current.node in seen:
                continue
            seen.add(current.node)
            yield current
            waiting += self._bases(current)

    def signature(self, found: Definition) -> inspect.Signature:
        """What a function takes, or a class by its constructor.

        Raises:
            NotInSourceError: it is no function, and no class whose constructor is in sight.
        """
        for owner in self.lineage(found):
            if (init := members(owner.node).get("__init__")) is not None:
                return _signature(init)
            if _is_dataclass(owner.node):
                return self._dataclass_signature(owner)
        return _signature(found.node)

    def declared(self, found: Definition) -> set[str]:
        """Names that a class and its bases declare: fields, annotations, methods, properties."""
        return {name for owner in self.lineage(found) for name in members(owner.node)}

    def assigned(self, found: Definition) -> set[str]:
        """What methods of a class and of its bases set on ``self``: ``a`` of ``self.a``, and
        ``a.b`` of ``self.a.b``."""
        return {name for owner in self.lineage(found) for name in _set_on_self(owner.node)}

    def annotated_in(self, package: str) -> set[str]:
        """Names that classes of a package's modules annotate; none without such a package."""
        folder = self._root.joinpath(package.replace(".", "/"))
        files = folder.iterdir() if folder.is_dir() else ()
        modules = [f"{package}.{f.name[:-3]}" for f in files if f.name.endswith(".py")]
        return {
            name
            for module in modules
            for node in self._module(module).values()
            for name, member in members(node).items()
            if isinstance(member, ast.AnnAssign)
        }

    def _in_module(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> Definition:
        bindings = self._module(module)
        if name not in bindings:
            return self._by_star(module, name, seen)
        node = bindings[name]
        if not isinstance(node, ast.ImportFrom):
            return Definition(module, node)
        source, original = _imported(self._package(module), node, name)
        if source in seen:
            raise NotInSourceError(f"{module} and {source} import {name} from each other")
        return self._in_module(source, original, seen | {module})

    def _by_star(self, module: str, name: str, seen: frozenset[str]) -> Definition:
        for key, node in self._module(module).items():
            if not key.startswith("*") or not isinstance(node, ast.ImportFrom):
                continue
            source, _ = _imported(self._package(module), node, "*")
            try:
                if source not in seen:
                    return self._in_module(source, name, seen | {module})
            except NotInSourceError:
                continue
        raise NotInSourceError(f"module {module} has no name {name}")

    def _in_class(self, found: Definition, name: str) -> Definition:
        for owner in self.lineage(found):
            if (node := members(owner.node).get(name)) is not None:
                return Definition(owner.module, node)
        raise NotInSourceError(f"{getattr(found.node, 'name', '?')} has no attribute {name}")

    def _bases(self, found: Definition) -> Iterator[Definition]:
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
            try:
                if isinstance(named, ast.Name):
                    yield self._in_module(found.module, named.id)
            except NotInSourceError:
                continue  # torch's, or another library's

    def _dataclass_signature(self, found: Definition) -> inspect.Signature:
        # Fields of bases come first, as in dataclasses.
        fields = {
            name: node
            for owner in reversed(list(self.lineage(found)))
            if _is_dataclass(owner.node)
            for name, node in members(owner.node).items()
            if isinstance(node, ast.AnnAssign) and _is_init_field(node)
        }
        return _in_order(
            inspect.Parameter(name, _ANY, default=_default(_has_default(node)))
            for name, node in fields.items()
        )

    def _module(self, module: str) -> dict[str, ast.AST]:
        if module not in self._bindings:
            file = self._file(module)
            if file is None:
                raise NotInSourceError(f"no module named {module}")
            try:
                tree = ast.parse(file.read_text(encoding="utf-8"))
            except SyntaxError as error:
                raise NotInSourceError(f"{module} cannot be parsed: {error}") from None
            self._bindings[module] = dict(_bindings(tree.body))
        return self._bindings[module]

    def _file(self, module: str) -> Any:
        path = module.replace(".", "/")
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if (file := self._root.joinpath(candidate)).is_file():
                return file
        return None

    def _package(self, module: str) -> str:
        file = self._file(module)
        return module if file.name == "__init__.py" else module.rpartition(".")[0]


def members(node: ast.AST) -> dict[str, ast.AST]:
    """What the body of a class binds, by name; nothing for what is no class."""
    return dict(_bindings(node.body)) if isinstance(node, ast.ClassDef) else {}


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            if not _is_accessor(node):
                yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            # A star stands for a name of its own in each module.
            star = f"* {node.module}"
            yield from (
                (star if alias.name == "*" else alias.asname or alias.name, node)
                for alias in node.names
            )
        elif isinstance(node, ast.Import):
            yield from (
                (alias.asname or alias.name.partition(".")[0], node) for alias in node.names
            )
        elif isinstance(node, ast.Assign):
            yield from ((name, node) for target in node.targets for name in _names(target))
        elif isinstance(node, ast.AnnAssign):
            yield from ((name, node) for name in _names(node.target))
        else:
            yield from _nested(node)


def _nested(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    # The last to bind a name counts. What stands in an `else` or in the handler of an exception is
    # for another platform or a fallback, and comes first.
    if isinstance(node, ast.Try):
        for handler in node.handlers:
            yield from _bindings(handler.body)
    for name in ("orelse", "body", "finalbody"):
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _bindings(getattr(node, name, []))


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _names(element)


def _is_accessor(node: ast.ClassDef | Function) -> bool:
    """Whether it is the setter of a property, or an overload: not what the name is first of all."""
    return bool(set(_decorators(node)) & {"setter", "deleter", "overload"})


def _is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and "dataclass" in _decorators(node)


def _decorators(node: ast.ClassDef | Function) -> Iterator[str]:
    """The last words of their names."""
    for decorator in node.decorator_list:
        named = decorator.func if isinstance(decorator, ast.Call) else decorator
        yield ast.unparse(named).rpartition(".")[2]


def _is_init_field(node: ast.AnnAssign) -> bool:
    init = _field_options(node).get("init")
    left_out = isinstance(init, ast.Constant) and not init.value
    return not left_out and "ClassVar" not in ast.unparse(node.annotation)


def _has_default(node: ast.AnnAssign) -> bool:
    options = _field_options(node)
    return node.value is not None and (
        not options or bool({"default", "default_factory"} & {*options})
    )


def _field_options(node: ast.AnnAssign) -> dict[str, ast.expr]:
    """What is passed to ``dataclasses.field``."""
    call = node.value
    if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "field":
        return {k.arg: k.value for k in call.keywords if k.arg}
    return {}


def _imported(package: str, node: ast.ImportFrom, name: str) -> tuple[str, str]:
    """The module that an import takes a name from, and its name there."""
    original = next(a.name for a in node.names if (a.asname or a.name) == name)
    if not node.level:
        return node.module or "", original
    parents = package.split(".")
    above = parents[: len(parents) - node.level + 1]
    return ".".join((*above, *([node.module] if node.module else []))), original


_ANY = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _signature(node: ast.AST) -> inspect.Signature:
    if not isinstance(node, Function):
        raise NotInSourceError("it is no function, as far as its source says")
    a, kinds = node.args, inspect.Parameter
    by_place = [*a.posonlyargs, *a.args]
    required = len(by_place) - len(a.defaults)
    takes = [kinds(p.arg, _ANY, default=_default(i >= required)) for i, p in enumerate(by_place)]
    if a.vararg:
        takes.append(kinds(a.vararg.arg, kinds.VAR_POSITIONAL))
    for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        takes.append(kinds(p.arg, kinds.KEYWORD_ONLY, default=_default(default is not None)))
    if a.kwarg:
        takes.append(kinds(a.kwarg.arg, kinds.VAR_KEYWORD))
    return _in_order(takes)


def _in_order(parameters: Iterable[inspect.Parameter]) -> inspect.Signature:
    # Unchecked: what inherits may have fields with defaults before those without (kw_only).
    return inspect.Signature(list(parameters), __validate_parameters__=False)


def _default(there_is_one: bool) -> object:
    return ... if there_is_one else inspect.Parameter.empty


def _set_on_self(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            root, _, name = ast.unparse(child).partition(".")
            if root == "self":
                yield name

"""Classes of the program's main module, which a spawned process knows under another name.

``multiprocessing`` runs a script file again in every spawned process, as ``__mp_main__`` and
without its ``if __name__ == "__main__":`` part. What was started with ``python -m package.module``
is run again too, but can as well be imported by its real name.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable, Iterator

NAMES = ("__mp_main__", "__main__")
"""Of the main module, in the order to look: a spawned process has its script in the first."""


def modules() -> list[ModuleType]:
    """Return the main module, or modules, of this process."""
    return [sys.modules[name] for name in NAMES if name in sys.modules]


def real_name(main: ModuleType) -> str | None:
    """Return what ``python -m`` was given, or None if the program was not started that way."""
    spec = getattr(main, "__spec__", None)
    # A directory or zip file given to Python has a spec too, with a name that cannot be imported.
    return spec.name if spec is not None and spec.name not in NAMES else None


def why_unreachable(main: ModuleType, qualname: str) -> str | None:
    """Return why a spawned process cannot find a class of the main module, or None if it can."""
    name = qualname.partition(".")[0]
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file):
        return (
            f"{name} is defined in a program without a file of its own (python -c, standard input, "
            "an interactive session or a notebook), which the scheduler processes cannot run again"
        )
    module = real_name(main)
    if module is not None and module.endswith(".__main__"):
        # It could be imported by that name, but may start a server without asking for its name.
        return (
            f"{name} is defined in {file}, the main module of a package, "
            "which multiprocessing does not run again in the scheduler processes"
        )
    if module is None and getattr(main, "__spec__", None) is not None:
        return (
            f"{name} is defined in {file}, which was started as a directory or zip file; "
            "multiprocessing does not run those again in the scheduler processes"
        )
    return _why_not_at_top(file, name)


def _why_not_at_top(file: str, name: str) -> str | None:
    import ast

    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return None  # Nothing to be learnt; the scheduler process will say what it cannot find.
    guarded: set[str] = set()
    bound: set[str] = set()
    for statement, is_guarded in _top_level(tree.body, guarded=False):
        (guarded if is_guarded else bound).update(_bound_names(statement))
    if name in bound or "*" in bound:
        return None
    if name in guarded:
        return (
            f'{name} is defined under `if __name__ == "__main__":` in {file}, '
            "which the scheduler processes do not run"
        )
    return f"{name} is not defined at the top level of {file}"


def _top_level(body: Iterable[ast.stmt], guarded: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements run at import, also inside if, try, with and loops, and whether they
    run in the main program only."""
    import ast

    for statement in body:
        yield statement, guarded
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        main_in_body, main_in_else = _is_guard(statement)
        yield from _top_level(getattr(statement, "body", ()), guarded or main_in_body)
        yield from _top_level(getattr(statement, "orelse", ()), guarded or main_in_else)
        yield from _top_level(getattr(statement, "finalbody", ()), guarded)
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _top_level(part.body, guarded)


def _is_guard(statement: ast.stmt) -> tuple[bool, bool]:
    """Return whether the body and the else part run in the main program only."""
    import ast

    test = getattr(statement, "test", None)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_compares_main(value, ast.Eq) for value in test.values), False
    return _compares_main(test, ast.Eq), _compares_main(test, ast.NotEq)


def _compares_main(test: ast.expr | None, operator: type[ast.cmpop]) -> bool:
    import ast

    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], operator)):
        return False
    sides = (test.left, test.comparators[0])
    return any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides) and any(
        isinstance(side, ast.Constant) and side.value == "__main__" for side in sides
    )


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    import ast

    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))

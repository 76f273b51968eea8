"""Policies as text, which is how they reach the scheduler processes: text to policy and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import _registry
from sglang_dynspec.policy._syntax import (
    MAX_DEPTH,
    MAX_LENGTH,
    And,
    Call,
    Items,
    Literal,
    Node,
    PolicyNode,
    Table,
    parse,
    unparse,
)
from sglang_dynspec.policy.base import BatchView, Policy
from sglang_dynspec.policy.combine import Smaller

__all__ = ["check_policy_text", "parse_policy", "policy_text"]


def parse_policy(text: str) -> Policy:
    """Make the policy that a text describes, importing what it names.

    The text is a policy's name, with arguments as in a Python call: ``batch_size(off_at=32)``, or
    just ``never``. Policies can be arguments, ``min_dwell(batch_size(8), steps=20)``, and are
    joined with ``&``, which takes the smaller answer. A class of your own is written
    ``package.module:Class(arg=1)``. Arguments are numbers, strings, booleans, None, and lists,
    tuples or dicts of these and of policies.

    Raises:
        PolicyError: the text is malformed, a name is unknown, or an argument is refused.
    """
    return _build(parse(text), _registry.find_class)


def check_policy_text(text: str) -> str:
    """Check a policy's text as far as possible without importing anybody's code, and return it in
    its canonical form.

    Checks the syntax, the names of policies, and the arguments of shipped policies. What stands as
    ``package.module:Class`` is not looked for.

    Raises:
        PolicyError: as :func:`parse_policy`.
    """
    tree = parse(text)
    _build(tree, _find_shipped)
    return unparse(tree)


def policy_text(policy: Policy) -> str:
    """Return the text of a policy, from the arguments it was made with.

    ``parse_policy`` makes an equal policy of it, in its first state, in this process or in one
    that ``multiprocessing`` spawned.

    Raises:
        PolicyError: the policy could not be made again in a spawned process: its class cannot be
            found there, or an argument has no text form.
    """
    if not isinstance(policy, Policy):
        fix = f": {policy.__name__}(...)" if isinstance(policy, type) else ""
        raise PolicyError(f"{policy!r} is no policy; pass an instance of a Policy subclass{fix}")
    text = unparse(_describe(policy, 0))
    if len(text) > MAX_LENGTH:
        raise PolicyError(
            f"{type(policy).__name__}(...) is {len(text)} characters long as text; at most "
            f"{MAX_LENGTH} fit an environment variable: move the data to a file and give its path "
            "as an argument"
        )
    return text


# --- tree to policy ---------------------------------------------------------------------------


class _Unknown(Policy):
    """Stands for a class that is not to be imported: takes any arguments, is never asked."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def decide(self, batch: BatchView) -> int:
        raise NotImplementedError


def _find_shipped(name: str) -> type[Policy]:
    _registry.check_name(name)
    return _registry.find_class(name) if name in _registry.SHIPPED else _Unknown


def _build(node: PolicyNode, find_class: Callable[[str], type[Policy]]) -> Policy:
    if isinstance(node, And):
        return Smaller(*[_build(part, find_class) for part in node.parts])
    try:
        cls = find_class(node.name)
    except Exception as error:
        raise _located(node, error) from error
    args = [_value(arg, find_class) for arg in node.args]
    kwargs = {key: _value(value, find_class) for key, value in node.kwargs}
    _check_arguments(node, cls)
    try:
        return cls(*args, **kwargs)
    except Exception as error:
        raise _located(node, error) from error


def _located(node: Call, error: Exception) -> PolicyError:
    if isinstance(error, PolicyError):
        return node.place.error(str(error))
    return node.place.error(f"{node.name} could not be made: {type(error).__name__}: {error}")


def _value(node: Node, find_class: Callable[[str], type[Policy]]) -> object:
    if isinstance(node, Literal):
        return node.value
    if isinstance(node, Items):
        return node.kind([_value(item, find_class) for item in node.items])
    if isinstance(node, Table):
        return {_value(k, find_class): _value(v, find_class) for k, v in node.items}
    return _build(node, find_class)


def _check_arguments(node: Call, cls: type[Policy]) -> None:
    try:
        signature = inspect.signature(cls.__init__)
    except (TypeError, ValueError):
        return  # Made of something that cannot tell; making the policy will show.
    parameters = list(signature.parameters.values())[1:]  # not self
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = _accepted(node.name, parameters)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for (key, value), place in zip(node.kwargs, node.kwarg_places, strict=True):
            if key not in named:
                raise place.error(
                    f"{node.name} has no parameter {key!r} (given as {key}={unparse(value)[:40]})"
                    f"{_registry.suggestion(key, named)}; {accepted}"
                )
    try:
        signature.bind(None, *node.args, **dict(node.kwargs))
    except TypeError as error:
        raise node.place.error(f"{node.name}: {error}; {accepted}") from error


def _accepted(name: str, parameters: list[inspect.Parameter]) -> str:
    if not parameters:
        return f"{name} takes no arguments"
    bare = [p.replace(annotation=p.empty) for p in parameters]
    return f"accepted are {name}{inspect.Signature(bare)}"


# --- policy to tree ---------------------------------------------------------------------------


def _describe(policy: Policy, depth: int) -> PolicyNode:
    if type(policy) is Smaller:
        return And(tuple(_describe(part, depth) for part in policy.parts))
    cls = type(policy)
    name = _registry.name_of(cls)
    if "_arguments" not in vars(policy):
        raise PolicyError(
            f"the arguments of {cls.__qualname__} are not known: its __new__ must call "
            "Policy.__new__(cls, *args, **kwargs) with the arguments it was given"
        )
    args, kwargs = policy._arguments
    for key in kwargs:
        if not key.isidentifier():
            raise PolicyError(f"{cls.__qualname__}: {key!r} cannot be the name of an argument")
    return Call(
        name,
        tuple(_argument(cls, f"argument {i}", arg, depth) for i, arg in enumerate(args, 1)),
        tuple((key, _argument(cls, f"argument {key}", arg, depth)) for key, arg in kwargs.items()),
    )


def _argument(cls: type[Policy], where: str, value: object, depth: int) -> Node:
    """Return the tree of an argument; ``where`` says which one it is."""
    if depth >= MAX_DEPTH - 1:
        raise PolicyError(f"{cls.__qualname__}: {where} is nested deeper than {MAX_DEPTH} levels")

    def inner(item: object) -> Node:
        return _argument(cls, where, item, depth + 1)

    if isinstance(value, Policy):
        return _describe(value, depth + 1)
    # Exact types: a subclass would arrive in the other process as what it derives from.
    if type(value) is list:
        return Items(list, tuple(map(inner, value)))
    if type(value) is tuple:
        return Items(tuple, tuple(map(inner, value)))
    if type(value) is dict:
        return Table(tuple((_key(cls, where, k), inner(v)) for k, v in value.items()))
    return _scalar(cls, where, value)


def _key(cls: type[Policy], where: str, value: object) -> Node:
    return _scalar(cls, f"a key of the dict in {where}", value)


def _scalar(cls: type[Policy], where: str, value: object) -> Literal:
    if value is None or (isinstance(value, (bool, int, float, str)) and _has_text(value)):
        return Literal(value)
    fix = "pass numbers, strings, booleans, None, or lists, tuples or dicts of these"
    if isinstance(value, (int, float, str)) and type(value) not in (int, float, str):
        plain = next(kind for kind in (int, float, str) if isinstance(value, kind))
        fix = f"pass {plain.__name__}(...) of it"
    elif callable(value):
        fix = "define the policy's behaviour in its class, and choose with a string argument"
    raise PolicyError(
        f"{cls.__qualname__}: {where} is {_shown(value)}, which cannot be written as text for the "
        f"scheduler processes; {fix}"
    )


def _has_text(value: bool | int | float | str) -> bool:
    """Return whether a value is plain, and one that Python reads and writes."""
    if type(value) not in (bool, int, float, str) or value != value:  # nan has no literal
        return False
    try:
        repr(value)
    except ValueError:  # An int of thousands of digits.
        return False
    return True


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except Exception:
        shown = "a value"
    return f"{shown[:80]} ({type(value).__name__})"

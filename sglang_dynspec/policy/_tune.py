"""Other numbers for the parameters of a policy, by its text."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import _registry
from sglang_dynspec.policy._syntax import (
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

_SHOWN = 40


def tuned(text: str, changes: Mapping[str, float]) -> str:
    """Return a policy's text with other arguments.

    Args:
        text: the policy, which may be made of others.
        changes: numbers by the parameter's name, ``off_at``; where several policies have one of
            that name, by the policy's name in the text and the parameter's, ``batch_size.off_at``.

    Raises:
        PolicyError: no policy in the text has such a parameter, or more than one; the text that is
            returned may still be refused by :func:`~sglang_dynspec.policy.text.parse_policy`.
    """
    tree = parse(text)
    for name, value in changes.items():
        slot = _slot(tree, name)
        tree = _only_policy(_replaced(tree, slot.call, _with(slot, _as_held(slot, value))))
    return unparse(tree)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter of one policy in the text."""

    call: Call
    parameter: str
    position: int | None
    """Where it stands among positional arguments; None: it cannot."""
    now: Node | None
    """None: it has no value, and no default that could be shown."""

    def is_called(self, name: str) -> bool:
        return name in (self.parameter, f"{self.call.name}.{self.parameter}")


def _slot(tree: PolicyNode, name: str) -> _Slot:
    slots = list(_slots(tree))
    found = [slot for slot in slots if slot.is_called(name)]
    if len(found) == 1:
        return found[0]
    shown = unparse(tree)
    if not slots:
        raise PolicyError(
            f"{name} is no parameter of {shown}, which has none; put another policy in its place"
        )
    names = [_name(slot, slots) for slot in slots]
    accepted = ", ".join(dict.fromkeys(map(_described, slots, names)))
    if found:
        full = dict.fromkeys(f"{slot.call.name}.{slot.parameter}" for slot in found)
        fix = (
            f"write one of {', '.join(full)}"
            if len(full) == len(found)
            else "put the whole policy in its place with the numbers you want"
        )
        raise PolicyError(f"{name} stands for {len(found)} parameters of {shown}; {fix}")
    hint = _registry.suggestion(name, names)
    raise PolicyError(f"{name} is no parameter of {shown}{hint}; accepted are {accepted}")


def _name(slot: _Slot, slots: list[_Slot]) -> str:
    """The shortest name that stands for no other parameter, where there is one."""
    alone = sum(other.parameter == slot.parameter for other in slots) == 1
    return slot.parameter if alone else f"{slot.call.name}.{slot.parameter}"


def _described(slot: _Slot, name: str) -> str:
    return name if slot.now is None else f"{name} (now {unparse(slot.now)[:_SHOWN]})"


def _slots(node: Node) -> Iterator[_Slot]:
    if isinstance(node, Call):
        yield from _own_slots(node)
    for child in _children(node):
        yield from _slots(child)


def _own_slots(call: Call) -> Iterator[_Slot]:
    signature = inspect.signature(_registry.find_class(call.name).__init__)
    parameters = list(signature.parameters.values())[1:]  # not self
    given = dict(call.kwargs)
    for index, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        position = None if parameter.kind is parameter.KEYWORD_ONLY else index
        if position is not None and position < len(call.args):
            now: Node | None = call.args[position]
        else:
            now = given.get(parameter.name, _default(parameter))
        if not isinstance(now, (Call, And)):
            yield _Slot(call, parameter.name, position, now)


def _default(parameter: inspect.Parameter) -> Node | None:
    value = parameter.default
    return Literal(value) if isinstance(value, (bool, int, float, str, type(None))) else None


def _as_held(slot: _Slot, value: float) -> Literal:
    # A number is all that some of SGLang's releases let through, so 1 and 0 stand for booleans too.
    is_flag = isinstance(slot.now, Literal) and isinstance(slot.now.value, bool)
    if is_flag and value in (0, 1):
        return Literal(bool(value))
    return Literal(int(value) if isinstance(value, float) and value.is_integer() else value)


def _with(slot: _Slot, value: Literal) -> Call:
    call, at = slot.call, slot.position
    if at is not None and at < len(call.args):
        return replace(call, args=(*call.args[:at], value, *call.args[at + 1 :]))
    return replace(call, kwargs=tuple({**dict(call.kwargs), slot.parameter: value}.items()))


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Call(_, args, kwargs):
            return (*args, *(value for _, value in kwargs))
        case And(parts):
            return parts
        case Items(_, items):
            return items
        case Table(items):
            return tuple(value for _, value in items)
        case Literal():
            return ()


def _replaced(node: Node, old: Call, new: Call) -> Node:
    def inner(child: Node) -> Node:
        return _replaced(child, old, new)

    if node is old:
        return new
    match node:
        case Call(_, args, kwargs):
            return replace(
                node,
                args=tuple(map(inner, args)),
                kwargs=tuple((key, inner(value)) for key, value in kwargs),
            )
        case And(parts):
            return replace(node, parts=tuple(_only_policy(inner(part)) for part in parts))
        case Items(_, items):
            return replace(node, items=tuple(map(inner, items)))
        case Table(items):
            return replace(node, items=tuple((key, inner(value)) for key, value in items))
        case Literal():
            return node


def _only_policy(node: Node) -> PolicyNode:
    assert isinstance(node, (Call, And))
    return node

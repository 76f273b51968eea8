"""The text form of policies: text to tree and back. Knows no policy and imports none.

    policy   = term { "&" term }
    term     = "(" policy ")" | name [ "(" [ argument { "," argument } [ "," ] ] ")" ]
    name     = identifier | dotted ":" dotted
    argument = [ identifier "=" ] value
    value    = policy | number | string | True | False | None | list | tuple | dict

Numbers, strings, lists, tuples and dicts are written as in Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from sglang_dynspec.errors import PolicyError

MAX_DEPTH = 40
"""Levels of nesting; more would run into Python's recursion limit."""

MAX_LENGTH = 30_000
"""Characters; the text travels in an environment variable, and Linux refuses one of 128 KiB."""

_MAX_SHOWN = 96
"""Characters of a line that an error shows."""

Scalar: TypeAlias = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Place:
    """A part of the text, to point at in errors."""

    text: str
    start: int
    end: int

    def error(self, message: str) -> PolicyError:
        """Return an error that shows the text with a mark under this place."""
        return PolicyError(f"{message}\n{self._shown()}" if self.text.strip() else message)

    def _shown(self) -> str:
        line_start = self.text.rfind("\n", 0, self.start) + 1
        line_end = self.text.find("\n", self.start)
        line = self.text[line_start : line_end if line_end >= 0 else len(self.text)]
        start = self.start - line_start
        width = max(1, min(self.end - self.start, len(line) - start))
        # Of a long line, what is around the place.
        cut = max(0, start - _MAX_SHOWN // 2)
        line = line[cut : cut + _MAX_SHOWN]
        start -= cut
        width = max(1, min(width, _MAX_SHOWN - start))
        line = "".join([char if char.isprintable() else " " for char in line])
        return f"    {line}\n    {' ' * start}{'^' * width}"


NOWHERE = Place("", 0, 0)


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, string, boolean or None."""

    value: Scalar
    place: Place = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Items:
    """A list or a tuple."""

    kind: type[list[object]] | type[tuple[object, ...]]
    items: tuple[Node, ...]
    place: Place = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Table:
    """A dict."""

    items: tuple[tuple[Node, Node], ...]
    place: Place = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Call:
    """A policy class by its name, ``batch_size`` or ``package.module:Class``, with arguments."""

    name: str
    args: tuple[Node, ...] = ()
    kwargs: tuple[tuple[str, Node], ...] = ()
    place: Place = field(default=NOWHERE, compare=False, repr=False)
    kwarg_places: tuple[Place, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class And:
    """Two or more policies of which the smallest answer counts; none of them is an And."""

    parts: tuple[PolicyNode, ...]
    place: Place = field(default=NOWHERE, compare=False, repr=False)


PolicyNode: TypeAlias = Call | And
Node: TypeAlias = Literal | Items | Table | Call | And


def parse(text: str) -> PolicyNode:
    """Return the tree of a policy's text.

    Raises:
        PolicyError: the text is not well formed; shows where, what is there and what may be.
    """
    if not text.strip():
        raise PolicyError("the policy is empty; write for example batch_size(off_at=32) or always")
    if len(text) > MAX_LENGTH:
        raise PolicyError(
            f"the policy is {len(text)} characters long; at most {MAX_LENGTH} fit an environment "
            "variable: move the data to a file and give its path as an argument"
        )
    return _Parser(text).whole()


def unparse(node: Node) -> str:
    """Return the canonical text of a tree: ``parse(unparse(tree)) == tree``."""
    match node:
        case Literal(value):
            return _literal_text(value)
        case Items(kind, items):
            inner = ", ".join(map(unparse, items))
            if kind is list:
                return f"[{inner}]"
            return f"({inner},)" if len(items) == 1 else f"({inner})"
        case Table(items):
            return "{" + ", ".join(f"{unparse(k)}: {unparse(v)}" for k, v in items) + "}"
        case Call(name, args, kwargs):
            shown = [unparse(arg) for arg in args]
            shown += [f"{key}={unparse(value)}" for key, value in kwargs]
            return f"{name}({', '.join(shown)})" if shown else name
        case And(parts):
            return " & ".join(map(unparse, parts))


def _literal_text(value: Scalar) -> str:
    # Infinity has no literal in Python; a number too large for a float reads as one.
    return repr(value).replace("inf", "1e999") if isinstance(value, float) else repr(value)


# --- text to tokens ---------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""
    (?P<space> \s+ )
  | (?P<name> [^\W\d]\w* (?: \. [^\W\d]\w* )* )
  | (?P<number> (?: [0-9] [0-9_]* (?: \. [0-9_]* )? | \. [0-9] [0-9_]* ) (?: [eE] [+-]? [0-9]+ )? )
  | (?P<string> "(?: [^"\\\n] | \\. )*" | '(?: [^'\\\n] | \\. )*' )
  | (?P<symbol> [()\[\]{},=:&+-] )
    """,
    re.VERBOSE,
)

_ESCAPE = re.compile(
    r"\\(?: x(?P<x>[0-9a-fA-F]{2}) | u(?P<u>[0-9a-fA-F]{4}) | U(?P<U>[0-9a-fA-F]{8}) | (?P<c>.) )",
    re.VERBOSE | re.DOTALL,
)

_SIMPLE_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "r": "\r", "t": "\t", "0": "\0"}

_CONSTANTS: dict[str, Scalar] = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # name, number, string, symbol, end
    text: str
    place: Place

    def __str__(self) -> str:
        return "the end of the text" if self.kind == "end" else f"'{self.text[:40]}'"


def _tokens(text: str) -> list[_Token]:
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _stray(text, position)
        kind = match.lastgroup or ""
        if kind != "space":
            tokens.append(_Token(kind, match[0], Place(text, position, match.end())))
        position = match.end()
    tokens.append(_Token("end", "", Place(text, len(text.rstrip()), len(text))))
    return tokens


def _stray(text: str, position: int) -> PolicyError:
    char = text[position]
    place = Place(text, position, position + 1)
    if char in "'\"":
        return Place(text, position, len(text)).error(
            f"the string that starts here has no closing {char}"
        )
    if char == "|":
        return place.error(
            "found '|'; policies are joined with '&', which takes the smaller answer"
        )
    return place.error(
        f"found {char!r}, which has no meaning here; a policy looks like batch_size(off_at=32)"
    )


# --- tokens to tree ---------------------------------------------------------------------------


class _Parser:
    """Recursive descent over the tokens; one method a rule of the grammar above."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0

    def whole(self) -> PolicyNode:
        node = self._policy()
        if self._next.kind != "end":
            self._expected("'&' or the end of the text")
        return node

    # What the rules are made of.

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _is(self, symbol: str) -> bool:
        return self._next.kind == "symbol" and self._next.text == symbol

    def _take(self) -> _Token:
        token = self._next
        self._at += 1
        return token

    def _skip(self, symbol: str) -> bool:
        found = self._is(symbol)
        self._at += found
        return found

    def _expect(self, symbol: str, also: str = "") -> None:
        if not self._skip(symbol):
            self._expected(also + f"'{symbol}'")

    def _expected(self, what: str) -> NoReturn:
        raise self._next.place.error(f"found {self._next}, expected {what}")

    def _since(self, start: int) -> Place:
        return Place(self._text, start, self._tokens[self._at - 1].place.end)

    def _nested(self, rule: Callable[[], Node]) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._next.place.error(f"nested deeper than {MAX_DEPTH} levels")
        node = rule()
        self._depth -= 1
        return node

    # The rules.

    def _policy(self) -> PolicyNode:
        if self._next.kind != "name" and not self._is("("):
            self._expected("a policy, such as batch_size(off_at=32)")
        return self._only_policy(self._nested(self._expression))

    def _expression(self) -> Node:
        """Any value; policies may be joined with '&'."""
        start = self._next.place.start
        first = self._operand()
        if not self._is("&"):
            return first
        parts = [self._only_policy(first)]
        while self._skip("&"):
            parts.append(self._only_policy(self._operand()))
        flat: list[PolicyNode] = []
        for part in parts:
            flat.extend(part.parts if isinstance(part, And) else (part,))
        return And(tuple(flat), self._since(start))

    def _operand(self) -> Node:
        token = self._next
        if token.kind == "name" and token.text not in _CONSTANTS:
            return self._call()
        if token.kind in ("name", "number", "string") or self._is("-") or self._is("+"):
            return self._literal()
        if self._is("("):
            return self._parenthesis()
        if self._is("["):
            self._take()
            items = self._items(first=(), closing="]")
            return Items(list, items, self._since(token.place.start))
        if not self._is("{"):
            self._expected("a policy or a value")
        return self._table()

    def _only_policy(self, node: Node) -> PolicyNode:
        if isinstance(node, (Call, And)):
            return node
        raise node.place.error(f"found {unparse(node)[:40]}, expected a policy")

    def _call(self) -> Call:
        start = self._next.place.start
        name = self._name()
        place = self._since(start)
        if not self._skip("("):
            return Call(name, place=place)
        args: list[Node] = []
        kwargs: dict[str, Node] = {}
        places: list[Place] = []
        while not self._is(")"):
            self._argument(args, kwargs, places)
            if not self._skip(","):
                break
        self._expect(")", also="',' or ")
        return Call(name, tuple(args), tuple(kwargs.items()), place, tuple(places))

    def _name(self) -> str:
        token = self._take()
        if self._skip(":"):
            if self._next.kind != "name":
                self._expected("the name of a class")
            return f"{token.text}:{self._take().text}"
        if "." in token.text:
            module, _, name = token.text.rpartition(".")
            raise token.place.error(
                f"found {token}, expected a policy; write a class of your own with a colon between "
                f"module and class: {module}:{name}"
            )
        return token.text

    def _argument(self, args: list[Node], kwargs: dict[str, Node], places: list[Place]) -> None:
        token = self._next
        following = self._tokens[min(self._at + 1, len(self._tokens) - 1)]
        if not (token.kind == "name" and following.kind == "symbol" and following.text == "="):
            if kwargs:
                self._expected("a named argument (name=value), since one stands before it")
            args.append(self._nested(self._expression))
            return
        if not token.text.isidentifier():
            self._expected("the name of a parameter")
        if token.text in kwargs:
            raise token.place.error(f"{token.text} is given twice")
        self._take()
        self._take()
        kwargs[token.text] = self._nested(self._expression)
        places.append(self._since(token.place.start))

    def _parenthesis(self) -> Node:
        """A policy in parentheses, or a tuple."""
        start = self._take().place.start
        if self._skip(")"):
            return Items(tuple, (), self._since(start))
        first = self._nested(self._expression)
        if self._skip(")"):
            return first
        self._expect(",", also="')' or ")
        items = self._items(first=(first,), closing=")")
        return Items(tuple, items, self._since(start))

    def _items(self, first: tuple[Node, ...], closing: str) -> tuple[Node, ...]:
        items = list(first)
        while not self._is(closing):
            items.append(self._nested(self._expression))
            if not self._skip(","):
                break
        self._expect(closing, also="',' or ")
        return tuple(items)

    def _table(self) -> Table:
        start = self._take().place.start
        items: list[tuple[Node, Node]] = []
        while not self._is("}"):
            key = self._literal()
            self._expect(":")
            items.append((key, self._nested(self._expression)))
            if not self._skip(","):
                break
        self._expect("}", also="',' or ")
        return Table(tuple(items), self._since(start))

    def _literal(self) -> Literal:
        start = self._next.place.start
        sign = self._take().text if self._is("-") or self._is("+") else ""
        token = self._next
        if token.kind == "number":
            value: Scalar = self._number(self._take(), negative=sign == "-")
        elif sign:
            self._expected("a number")
        elif token.kind == "string":
            value = self._string(self._take())
        elif token.kind == "name" and token.text in _CONSTANTS:
            value = _CONSTANTS[self._take().text]
        else:
            self._expected("a number, a string, True, False or None")
        return Literal(value, self._since(start))

    @staticmethod
    def _number(token: _Token, negative: bool) -> int | float:
        whole = token.text.replace("_", "").isdecimal()
        try:
            value = int(token.text) if whole else float(token.text)
        except ValueError:
            raise token.place.error(f"found {token}, which is no number") from None
        return -value if negative else value

    @staticmethod
    def _string(token: _Token) -> str:
        def unescaped(match: re.Match[str]) -> str:
            code = match["x"] or match["u"] or match["U"]
            try:
                return chr(int(code, 16)) if code else _SIMPLE_ESCAPES[match["c"]]
            except (KeyError, ValueError, OverflowError):
                raise token.place.error(
                    f"the string has an unknown escape {match[0]!r}; write a backslash as \\\\"
                ) from None

        return _ESCAPE.sub(unescaped, token.text[1:-1])

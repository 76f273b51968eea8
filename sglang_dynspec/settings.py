"""Arguments, environment and file: one validated Settings.

What is given as an argument comes first, then ``SGLANG_DYNSPEC_*`` variables, then the file, then
the defaults. Every value is checked, also one that another overrides.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from sglang_dynspec.errors import ConfigError, PolicyError
from sglang_dynspec.policy.text import check_policy_text, parse_policy, policy_text

if TYPE_CHECKING:
    from sglang_dynspec.policy.base import Policy

DraftState = Literal["catch_up", "warm", "skip"]

PREFIX = "SGLANG_DYNSPEC_"
CONFIG_VARIABLE = "SGLANG_DYNSPEC_CONFIG"
STRICT_VARIABLE = "SGLANG_DYNSPEC_STRICT"

_VARIABLES = {
    "policy": "SGLANG_DYNSPEC_POLICY",
    "draft_state": "SGLANG_DYNSPEC_DRAFT_STATE",
    "catch_up_bytes": "SGLANG_DYNSPEC_CATCH_UP_BYTES",
    "steps": "SGLANG_DYNSPEC_STEPS",
    "trace": "SGLANG_DYNSPEC_TRACE",
    "trace_every": "SGLANG_DYNSPEC_TRACE_EVERY",
    "strict": STRICT_VARIABLE,
}
_KNOWN_VARIABLES = (*_VARIABLES.values(), CONFIG_VARIABLE, "SGLANG_DYNSPEC_CPU_ENGINE")

_DRAFT_STATES = ("catch_up", "warm", "skip")

# As SGLang reads its own boolean variables.
_TRUE = ("true", "1", "yes", "y")
_FALSE = ("false", "0", "no", "n")

_TRACE_EVERY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What dynspec is to do. Checked when made; the policy's text is brought to canonical form.

    Raises:
        PolicyError: ``policy`` cannot be read.
        ConfigError: another value is not one of those accepted.
    """

    policy: str | None = None
    """The policy as text, as :func:`sglang_dynspec.policy.parse_policy` reads it, or None: dynspec
    is not to be in force."""
    draft_state: DraftState = "catch_up"
    """``"catch_up"`` lets the draft take in what plain steps have left out when speculation comes
    back, ``"warm"`` during plain steps, ``"skip"`` not at all."""
    catch_up_bytes: int | None = None
    """Memory for what the draft is to catch up with, on each GPU; None: 512 MiB, or 1% of the GPU's
    memory where that is less."""
    steps: tuple[int, ...] = ()
    """Draft steps that can be run beside 0 and the server's ``--speculative-num-steps``, ascending;
    these two may be named as well."""
    trace: str | None = None
    """The file that decisions are traced to (absolute), or None."""
    trace_every: int = _TRACE_EVERY
    """Decode steps after which the trace gets a line where num_steps has not changed."""
    strict: bool = False
    """Whether a reason not to be in force stops the server."""

    def __post_init__(self) -> None:
        for key, value in _checked(self._as_dict(), _ARGUMENT).items():
            object.__setattr__(self, key, value)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Return the settings of the environment and of the file that it names.

        Args:
            environ: variables; ``os.environ`` by default. An empty one counts as not set.

        Raises:
            ConfigError: as :meth:`resolve`.
        """
        return cls.resolve(environ=environ)

    @classmethod
    def resolve(
        cls,
        *,
        policy: Policy | str | None = None,
        draft_state: str | None = None,
        catch_up_bytes: int | None = None,
        steps: Sequence[int] | None = None,
        trace: str | os.PathLike[str] | None = None,
        trace_every: int | None = None,
        strict: bool | None = None,
        config: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        trace_folder: bool = True,
    ) -> Settings:
        """Return the settings of arguments, environment and file.

        Args:
            policy: a policy or its text; None stands for not given, here and below.
            draft_state: ``"catch_up"``, ``"warm"`` or ``"skip"``.
            catch_up_bytes: memory for what the draft is to catch up with.
            steps: draft steps that can be run beside 0 and the server's own.
            trace: the file that decisions are traced to.
            trace_every: decode steps after which it gets a line in any case.
            strict: stop the server instead of running without dynspec.
            config: a TOML file with the keys ``policy``, ``draft_state``, ``catch_up_bytes``,
                ``steps``, ``trace``, ``trace_every`` and ``strict``; instead of the one named by
                ``SGLANG_DYNSPEC_CONFIG``.
            environ: variables; ``os.environ`` by default. An empty one counts as not set.
            trace_folder: require the trace's folder to be there. A server that is being started
                does not: it says what is wrong and runs without the trace.

        Raises:
            PolicyError: the argument ``policy`` cannot be read, or cannot reach a spawned process.
            ConfigError: any other value, variable or file cannot be used.
        """
        environ = os.environ if environ is None else environ
        given = {
            "policy": policy,
            "draft_state": draft_state,
            "catch_up_bytes": catch_up_bytes,
            "steps": steps,
            "trace": trace,
            "trace_every": trace_every,
            "strict": strict,
        }
        path = config if config is not None else environ.get(CONFIG_VARIABLE, "").strip() or None
        from_file = {} if path is None else _read_file(_path(path))
        from_arguments = _checked({k: v for k, v in given.items() if v is not None}, _ARGUMENT)
        settings = cls(**{**from_file, **_read_environment(environ), **from_arguments})
        if trace_folder:
            _require_folder(settings.trace)
        return settings

    def to_environment(self) -> dict[str, str]:
        """Return the variables that give spawned processes these settings.

        All of them, so that nothing that stood there before shows through; an empty value means
        not set. The file is not read again.
        """
        return {
            _VARIABLES["policy"]: self.policy or "",
            _VARIABLES["draft_state"]: self.draft_state,
            _VARIABLES["catch_up_bytes"]: str(self.catch_up_bytes or ""),
            _VARIABLES["steps"]: ",".join(map(str, self.steps)),
            _VARIABLES["trace"]: self.trace or "",
            _VARIABLES["trace_every"]: str(self.trace_every),
            STRICT_VARIABLE: "1" if self.strict else "0",
            CONFIG_VARIABLE: "",
        }

    def build_policy(self) -> Policy:
        """Make the policy, importing what its text names.

        Raises:
            PolicyError: it cannot be made in this process.
            ConfigError: there is no policy in these settings.
        """
        if self.policy is None:
            raise ConfigError(
                f"no policy is set; pass one, or set {_VARIABLES['policy']}, for example to "
                "batch_size(off_at=32)"
            )
        return parse_policy(self.policy)

    def _as_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _VARIABLES}


def strict_from_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the environment asks to stop the server when dynspec cannot be in force.

    For when the settings as a whole are what is wrong: never raises. A value that is no boolean
    counts as true, because whoever set it wanted something.
    """
    environ = os.environ if environ is None else environ
    return environ.get(STRICT_VARIABLE, "").strip().lower() not in ("", *_FALSE)


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a warning for each ``SGLANG_DYNSPEC_*`` variable that means nothing to dynspec."""
    environ = os.environ if environ is None else environ
    return [
        f"{name} is no variable of sglang_dynspec{_suggestion(name, _KNOWN_VARIABLES)}; known are "
        f"{', '.join(_KNOWN_VARIABLES)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in _KNOWN_VARIABLES
    ]


# --- values -----------------------------------------------------------------------------------

_ARGUMENT = ""
"""Origin of values given as arguments; other origins are named in errors."""


def _checked(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the values with the policy in canonical form.

    Args:
        values: some of the fields of Settings.
        origin: where they come from: a file's path, or nothing for arguments.
    """
    checks: dict[str, Callable[[Any, str], Any]] = {
        "policy": _policy,
        "draft_state": _draft_state,
        "catch_up_bytes": _bytes,
        "steps": _steps,
        "trace": _trace,
        "trace_every": _trace_every,
        "strict": _strict,
    }
    return {key: checks[key](value, f"{origin}{key}") for key, value in values.items()}


def _policy(value: Any, where: str) -> str | None:
    if value is None:
        return None
    try:
        return check_policy_text(value) if isinstance(value, str) else policy_text(value)
    except PolicyError as error:
        if where == "policy":
            raise
        raise ConfigError(f"{where}: {error}") from error


def _draft_state(value: Any, where: str) -> DraftState:
    if value not in _DRAFT_STATES:
        hint = _suggestion(str(value), _DRAFT_STATES)
        raise ConfigError(
            f"{where} is {value!r}{hint}; write 'catch_up' (the draft takes in what it has missed "
            "when speculation comes back), 'warm' (it does so during plain steps) or 'skip'"
        )
    return cast(DraftState, value)


def _bytes(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{where} is {value!r}; it must be a number of bytes, a whole number >= 1, as in "
            "536870912 (512 MiB)"
        )
    return value


def _steps(value: Any, where: str) -> tuple[int, ...]:
    numbers: list[Any] = list(value) if isinstance(value, (list, tuple)) else [None]
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ConfigError(
            f"{where} is {value!r}; it must be a list of draft steps, whole numbers >= 0, as in "
            "[0, 1, 3]"
        )
    return tuple(sorted(set(numbers)))


def _trace(value: Any, where: str) -> str | None:
    if value is None:
        return None
    try:
        path = os.fsdecode(value)
    except TypeError:
        path = ""
    # Children read it from a variable, which is stripped and may hold no null byte.
    if not path or "\0" in path or path != path.strip() or path.endswith(os.sep):
        raise ConfigError(f"{where} is {value!r}; give the path of a file, as in decisions.jsonl")
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(path):
        raise ConfigError(
            f"{where} is {value!r}, which is a folder; give the path of a file, as in "
            f"{os.path.join(path, 'decisions.jsonl')}"
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(
            f"{where} is {value!r}, which is no regular file; give the path of one, as in "
            "decisions.jsonl"
        )
    return path


def _require_folder(trace: str | None) -> None:
    folder = os.path.dirname(trace or "")
    if trace is not None and not os.path.isdir(folder):
        raise ConfigError(
            f"trace ({_VARIABLES['trace']}) is {trace!r}, but there is no folder {folder!r}; make "
            "it, or name a file in a folder that is there"
        )


def _trace_every(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{where} is {value!r}; it must be a number of decode steps, a whole number >= 1, as "
            f"in {_TRACE_EVERY}"
        )
    return value


def _strict(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} is {value!r}, no boolean; write true or false")
    return value


# --- environment and file ---------------------------------------------------------------------


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, variable in _VARIABLES.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if key == "policy":
            values[key] = _policy(text, variable)
        elif key == "draft_state":
            values[key] = _draft_state(text.lower(), variable)
        elif key == "catch_up_bytes":
            values[key] = _bytes(int(text) if text.isdecimal() else text, variable)
        elif key == "trace":
            values[key] = _trace(text, variable)
        elif key == "trace_every":
            values[key] = _trace_every(int(text) if text.isdecimal() else text, variable)
        elif key == "steps":
            values[key] = _numbers(text, variable)
        else:
            values[key] = _boolean(text, variable)
    return values


def _numbers(text: str, variable: str) -> tuple[int, ...]:
    try:
        return _steps([int(word) for word in text.split(",")], variable)
    except ValueError:
        raise ConfigError(
            f"{variable} is {text!r}; write draft steps, whole numbers >= 0 with commas between, "
            "as in 0,1,3"
        ) from None


def _boolean(text: str, variable: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError(
        f"{variable} is {text!r}, no boolean; write one of {', '.join(_TRUE)} for on or "
        f"{', '.join(_FALSE)} for off"
    )


def _path(config: Any) -> str:
    try:
        return os.fsdecode(config)
    except TypeError:
        raise ConfigError(f"config is {config!r}; give the path of a TOML file") from None


def _read_file(path: str) -> dict[str, Any]:
    values = _load_toml(path)
    for key in values:
        if key not in _VARIABLES:
            raise ConfigError(
                f"{path}: unknown key {key!r}{_suggestion(key, _VARIABLES)}; known are "
                f"{', '.join(_VARIABLES)}, all at the top level"
            )
    if not isinstance(values.get("policy", ""), str):
        raise ConfigError(
            f"{path}: policy is {values['policy']!r}; write it as a string, for example "
            'policy = "batch_size(off_at=32)"'
        )
    return _checked(values, f"{path}: ")


def _load_toml(path: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

    text = _read(path)
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f'{path} is not valid TOML: {error}; a line looks like policy = "batch_size(off_at=32)"'
        ) from error
    return values


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; save it as UTF-8") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read the settings file {path!r}: {reason}; correct the path given by config= "
            f"or {CONFIG_VARIABLE}"
        ) from error


def _suggestion(name: str, known: Any) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

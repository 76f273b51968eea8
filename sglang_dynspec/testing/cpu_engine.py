"""Unmodified SGLang with EAGLE, EAGLE-3, MTP or STANDALONE on a CPU, for tests and to try it out.

Every process needs two things: the environment of :func:`environment`, and :func:`install` at
interpreter start, before SGLang is imported. With sglang_dynspec installed the second follows from
the first; a process that starts without it (PYTHONPATH only) calls ``install()`` itself.

    from sglang_dynspec.testing import cpu_engine
    os.environ.update(cpu_engine.environment())
    cpu_engine.install()
    import sglang
    engine = sglang.Engine(**cpu_engine.server_args("EAGLE3"))

``install`` imports nothing outside the standard library until SGLang is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = [
    "command_line",
    "environment",
    "has_mtp",
    "install",
    "server_args",
    "speculates_without_overlap",
]

_SWITCH = "SGLANG_DYNSPEC_CPU_ENGINE"

_ENVIRONMENT = {
    _SWITCH: "1",
    "SGLANG_ENABLE_SPEC_V2": "1",  # up to 0.5.10: EAGLEWorkerV2 instead of the older worker
    "SGLANG_USE_CPU_ENGINE": "1",  # is_cpu() of SGLang is true on a CPU without AMX, too
    "TORCHDYNAMO_DISABLE": "1",  # compiling would cost minutes and buy nothing here
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the tensors are tiny: more threads only wait for each other
    "TOKENIZERS_PARALLELISM": "false",
}


def environment(tp_size: int = 1) -> dict[str, str]:
    """The environment variables of a process that is to run SGLang on a CPU.

    Args:
        tp_size: ranks of tensor parallelism, each a process on a core of its own. They communicate
            through gloo.
    """
    if tp_size == 1:
        return dict(_ENVIRONMENT)
    cores = sorted(os.sched_getaffinity(0))
    return _ENVIRONMENT | {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
            str(cores[rank % len(cores)]) for rank in range(tp_size)
        ),
        "SGLANG_NCCL_SO_PATH": "none",  # SGLang's NCCL asks for a CUDA device where there is one
    }


def server_args(
    algorithm: str | None = None,
    *,
    num_steps: int = 3,
    overlap: bool = True,
    models: Any = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine`` or ``ServerArgs`` for a tiny server.

    Args:
        algorithm: None (no speculation), "EAGLE", "EAGLE3", "STANDALONE" or "NEXTN": a mixture of
            experts with an MTP layer, see :func:`has_mtp`.
        num_steps: draft steps, so ``num_steps + 1`` draft tokens.
        overlap: the overlap scheduler. Up to 0.5.12 SGLang speculates without it in an older
            worker, see :func:`speculates_without_overlap`.
        models: a :class:`~sglang_dynspec.testing.models.Models`; made when not given.
        overrides: any other SGLang server argument; wins over ours. None leaves SGLang's default.

    Raises:
        ValueError: an algorithm that the CPU engine has no draft for.
        UnsupportedError: speculation without overlap where that is not EAGLEWorkerV2's, or MTP
            where SGLang has none.
    """
    if algorithm is not None and not overlap and not speculates_without_overlap():
        from sglang_dynspec.errors import UnsupportedError

        raise UnsupportedError(
            "SGLang up to 0.5.12 runs EAGLEWorkerV2 under the overlap scheduler only; "
            "leave overlap=True, or use 0.5.13 or later"
        )
    if algorithm == "NEXTN" and not has_mtp():
        from sglang_dynspec.errors import UnsupportedError

        raise UnsupportedError(
            "SGLang up to 0.5.12 has no MTP layer for a Qwen3 mixture of experts; take another "
            "algorithm, or use 0.5.13 or later"
        )
    if models is None:
        from sglang_dynspec.testing.models import make_models

        models = make_models()
    arguments: dict[str, Any] = {
        "model_path": str(models.qwen3_moe if algorithm == "NEXTN" else models.target),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": not overlap,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "page_size": 1,
        "max_running_requests": 16,
        "max_total_tokens": 8192,
        "mem_fraction_static": 0.3,
        "random_seed": 1,
        "log_level": "error",
    }
    if algorithm is not None:
        drafts = {
            "EAGLE": models.eagle,
            "EAGLE3": models.eagle3,
            "STANDALONE": models.standalone,
            "NEXTN": models.mtp,
        }
        if algorithm not in drafts:
            raise ValueError(f"algorithm must be None or in {list(drafts)}, not {algorithm!r}")
        arguments.update(
            speculative_algorithm=algorithm,
            speculative_draft_model_path=str(drafts[algorithm]),
            speculative_num_steps=num_steps,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=num_steps + 1,
        )
    arguments.update(overrides)
    return {name: value for name, value in arguments.items() if value is not None}


def command_line(algorithm: str | None = None, **options: Any) -> list[str]:
    """The same as :func:`server_args`, as arguments of ``python -m sglang.launch_server``."""
    words: list[str] = []
    for name, value in server_args(algorithm, **options).items():
        if value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.extend(str(v) for v in (value if isinstance(value, (list, tuple)) else [value]))
    return words


def speculates_without_overlap() -> bool:
    """Whether the installed SGLang has EAGLEWorkerV2 without the overlap scheduler, too.

    Up to 0.5.12 it does not: Scheduler takes the older EAGLEWorker there
    (``SpeculativeAlgorithm.create_worker``), or turns overlap on again (0.5.9, 0.5.10).

    Raises:
        UnsupportedError: a release that the CPU engine does not know.
    """
    from sglang_dynspec.testing._cpu import v0_5_9

    return _family() is not v0_5_9


def has_mtp() -> bool:
    """Whether the installed SGLang has an MTP layer (``Qwen3MoeForCausalLMMTP``) for a target that
    the CPU engine makes: from 0.5.13 on.

    Raises:
        UnsupportedError: a release that the CPU engine does not know.
    """
    return speculates_without_overlap()  # the same releases, for reasons of their own


def install() -> None:
    """Make this process able to run SGLang on a CPU. Safe to call again.

    Does next to nothing until SGLang is imported, and then patches its modules as they come.

    Raises:
        UnsupportedError: SGLang is imported already; or, when it is imported later, a release that
            the CPU engine does not know or a real sgl_kernel.
    """
    if any(isinstance(finder, _Trigger) for finder in sys.meta_path) or _installed():
        return
    os.environ.setdefault(_SWITCH, "1")
    if "sglang.srt" in sys.modules:
        from sglang_dynspec.errors import UnsupportedError

        raise UnsupportedError(
            "cpu_engine.install() must run before SGLang is imported; set "
            f"{_SWITCH}=1 for the process, or call it first"
        )
    if "sglang" in sys.modules:
        _install_patches()
    else:
        sys.meta_path.insert(0, _Trigger())


class _Trigger(MetaPathFinder):
    """Notices the first import of SGLang. Costs nothing until then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Below "sglang" as well: another finder that takes itself off sys.meta_path while Python
        # walks that list makes Python miss the one behind it, which may be this one.
        if fullname.partition(".")[0] != "sglang":
            return None
        sys.meta_path.remove(self)
        try:
            _install_patches()
        except BaseException:
            sys.meta_path.insert(0, self)  # so that the next attempt fails as well
            raise
        return find_spec(fullname)  # for the same reason: walk the list anew


def _installed() -> bool:
    return "sglang_dynspec.testing._cpu.common" in sys.modules


def _install_patches() -> None:
    family = _family()
    from sglang_dynspec.testing._cpu import common, sgl_kernel_stub

    sgl_kernel_stub.install()
    common.patches.register()
    family.patches.register()


def _family() -> Any:
    """The patches for the installed SGLang."""
    from importlib.metadata import PackageNotFoundError, version

    from sglang_dynspec.errors import UnsupportedError
    from sglang_dynspec.testing._cpu import v0_5_9, v0_5_13, v0_5_16

    families = (v0_5_9, v0_5_13, v0_5_16)
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "one without package metadata"
    for family in families:
        if found in family.RELEASES:
            return family
    known = [release for family in families for release in family.RELEASES]
    raise UnsupportedError(
        f"the CPU engine runs SGLang {', '.join(known)}; found {found}. "
        f"Install one of those, or unset {_SWITCH} to run without the CPU engine"
    )

"""The models to serve: a checkpoint, or a shape whose weights are random.

Random weights are enough to measure an engine's cost per step. How many drafts would be accepted
they cannot tell, so that is simulated (SGLang's SGLANG_SIMULATE_ACC_LEN).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynspec_benchmark.errors import UsageError

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "head_dim": 128,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "head_dim": 64,
    },
    "tiny": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "head_dim": 64,
    },
}
_NAMES = {"8b": "Llama-3.1-8B", "1b": "Llama-3.2-1B", "tiny": "tiny Llama"}
_DRAFT_VOCAB_SIZE = 32000
_MAX_POSITIONS = 131072


@dataclass(frozen=True, slots=True)
class Model:
    """A target and its draft."""

    name: str
    """For people."""
    target: str
    """Path or name of the target."""
    draft: str | None
    """Path or name of the draft, if it is one of its own."""
    random_weights: bool = False
    max_positions: int | None = None
    """Of the target, if it can be told without a download."""

    def identity(self) -> dict[str, Any]:
        """What of it a result depends on: not the folder that a configuration was written to."""
        if self.random_weights:
            return {"name": self.name, "random_weights": True}
        known = asdict(self)
        return {key: known[key] for key in ("name", "target", "draft", "random_weights")}


def checkpoint(target: str, draft: str | None) -> Model:
    """Return the model of a checkpoint."""
    folder = Path(target)
    name = folder.name if folder.is_dir() else target
    return Model(name, target, draft, max_positions=_max_positions(folder))


def random_weights(shape: str, folder: Path) -> Model:
    """Write the configurations of a Llama and of a one-layer EAGLE-3 head, and return both.

    Args:
        shape: a key of SHAPES.
        folder: gets a folder for each of the two.

    Raises:
        OSError: they cannot be written.
    """
    common = {
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": _MAX_POSITIONS,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        **SHAPES[shape],
    }
    target = {**common, "architectures": ["LlamaForCausalLM"]}
    draft = {
        **common,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": _DRAFT_VOCAB_SIZE,
    }
    return Model(
        f"{_NAMES[shape]} shape with random weights; one-layer EAGLE-3 head, draft vocabulary "
        f"{_DRAFT_VOCAB_SIZE}",
        _write(folder / shape, target),
        _write(folder / f"{shape}-eagle3", draft),
        random_weights=True,
        max_positions=_MAX_POSITIONS,
    )


def _write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return str(folder.resolve())


def _max_positions(folder: Path) -> int | None:
    path = folder / "config.json"
    if not path.is_file():
        return None  # a name that SGLang will download
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}; give the folder of a checkpoint") from error
    # Multimodal models keep it in the part about text.
    found = config.get("max_position_embeddings") or config.get("text_config", {}).get(
        "max_position_embeddings"
    )
    return int(found) if found else None

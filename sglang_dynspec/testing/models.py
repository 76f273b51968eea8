"""A tiny Llama, and an EAGLE, an EAGLE-3 and a standalone draft for it, made from a seed; and the
same target as a Qwen3 and as a mixture of experts with an MTP layer.

The weights are not trained but built, so that greedy text is varied and safe from rounding, and so
that a draft is right only while *all* of its inputs are right. A token is five small digits
(a, b, c, d, e); each digit of the next token is looked up in a random table by one earlier token:

===== ============================================= ============================= ================
digit is looked up by                               the target gets it through    the draft through
===== ============================================= ============================= ================
a     the current token                             its embedding                 its embedding
b     the latest token of a kind (1 of 4) that the  attention by content          its KV
      current token names
c     the one before the latest of a kind (1 of 16) attention by content          its KV, made from
                                                                                  target hiddens
d     the token before the current one              attention one back            target's hidden
e     the token 37 before the current one           attention 37 back             nothing: it says 0
===== ============================================= ============================= ================

So a draft token is accepted when e is 0 (about 70 of 100 times), and a draft whose KV is stale or
missing, or that was given the wrong hidden state, is right by chance only.

Attention "n back" uses RoPE alone: query and key are constants whose angles agree at that distance.
Attention "by content" adds a slow RoPE pair that prefers the latest of all matches. A draft does it
by content only, or looks at its own position: 0.5.9 rotates the draft's decode steps one position
too far, later releases do not, and both keep the order of matches.

The standalone draft is a Llama of its own, half as deep and narrower, which is given no hidden
states. It finds b, c and d as the target does, and says 0 for e, so that it is right as often as
the others are. (On 0.5.9 its second draft token is less often: it finds d one position back.)

The best logit leads the second by about ``LOGIT_GAP``, far above float32 rounding: greedy output
cannot depend on what else is in the batch.

``python -m sglang_dynspec.testing.models DIRECTORY --seed 0`` writes them. Needs torch, safetensors
and tokenizers; nothing of SGLang.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["DRAFT_VOCAB_OFFSET", "VOCAB_SIZE", "Models", "default_directory", "make_models"]

# Change it with every change of the weights: it names the directory that make_models reuses.
_RECIPE = 5

_DIGITS = {"a": 8, "b": 4, "c": 4, "d": 2, "e": 2}
VOCAB_SIZE = math.prod(_DIGITS.values())  # 512
# Digit a is never 0 in a next token, so ids below this one (among them the specials) are never
# generated, and the EAGLE-3 draft's own vocabulary starts here, as real ones leave ids out too.
DRAFT_VOCAB_OFFSET = VOCAB_SIZE // _DIGITS["a"]  # 64

_E_IS_ZERO = 0.7
_E_LAG = 37  # a memory this long keeps greedy text out of short cycles

_HIDDEN_SIZE, _HEADS, _KV_HEADS, _HEAD_DIM, _INTERMEDIATE = 64, 4, 2, 32, 64
_STANDALONE_LAYERS = 2
_EXPERTS, _EXPERTS_A_TOKEN = 4, 2
_TARGET_LAYERS = 4  # the fewest from which EAGLE-3 can take three layers' hidden states
_ROPE_THETA = 1e6
_MAX_POSITIONS = 2048
_RMS_EPS = 1e-6
LOGIT_GAP = 4.0
_NOISE = 0.05  # of the random blocks, relative to a digit's 1

# RoPE turns elements i and i + head_dim / 2 of a head by theta ** -(2i / head_dim) a position.
_LAG_PAIRS = range(7)  # fast: tell neighbours apart
_RECENCY_PAIR = 8  # 0.001: falls with distance up to 1570 positions
_KIND_PAIRS = {"c": range(10, 14), "b": range(14, 16)}  # as good as still
_LAG_SCORE = 60.0
_RECENCY_SCORE = 8000.0  # 8 a position
_KIND_SCORE = 4100.0  # for each of its bits: no distance outweighs one
_KIND_BITS = sum(len(_pairs) for _pairs in _KIND_PAIRS.values())
# Root mean squares of queries by rule, the largest where heads of a layer differ. They are
# multiplied by the square root of the head's size, by which attention divides.
_LAG_QUERY = _LAG_SCORE * math.sqrt(len(_LAG_PAIRS))
_KIND_QUERY = math.hypot(
    _RECENCY_SCORE, _KIND_SCORE * math.sqrt(max(len(_pairs) for _pairs in _KIND_PAIRS.values()))
)

# Where things lie in a hidden state. a to e: the digits of the next token; in_x: what the current
# token says about digit x of a later token; key_x, query_x: its kind and the kind it looks for, in
# bits that are 1 or -1; one: a constant; before_c: in_c of the token before.
_LAYOUT: dict[str, range] = {}
for _name, _size in (
    *_DIGITS.items(),
    *((f"in_{_d}", _DIGITS[_d]) for _d in "bcde"),
    *((f"{_role}_{_d}", len(_KIND_PAIRS[_d])) for _role in ("key", "query") for _d in "bc"),
    ("one", 1),
    ("before_c", _DIGITS["c"]),
):
    _start = sum(len(_r) for _r in _LAYOUT.values())
    _LAYOUT[_name] = range(_start, _start + _size)
_LAYOUT["noise"] = range(_LAYOUT["before_c"].stop, _HIDDEN_SIZE)
# Another size than the target's: it has no noise. A multiple of the number of heads.
_STANDALONE_HIDDEN_SIZE = _HEADS * math.ceil(_LAYOUT["noise"].start / _HEADS)

# Squared norms of hidden states, which RMSNorm is told to leave alone.
_EMBEDDING_NORM2 = 20.0  # digit a, four in_x, twelve bits, the constant, noise of 2
_LAYER1_NORM2 = _EMBEDDING_NORM2 + 3  # and d, e, before_c
_TARGET_NORM2 = _LAYER1_NORM2 + 2  # and b, c
_NOISE_NORM2 = 2.0
_DRAFT_NORM2 = 7.0  # a to e, in_c, in_d
_MTP_NORM2 = 20.0  # a, d, e, in_b, in_c, in_d, before_c, twelve bits, the constant

_SPECIAL_TOKENS = {"<s>": 0, "</s>": 1, "<unk>": 2, "<pad>": 3}


@dataclass(frozen=True)
class Models:
    """Directories in Hugging Face layout: the target with its tokenizer, and its drafts."""

    target: Path
    eagle: Path
    eagle3: Path
    standalone: Path
    qwen3: Path | None = None
    """The same target as a Qwen3, which SGLang can run with DP attention; Llama it cannot."""
    qwen3_moe: Path | None = None
    """The same target as a mixture of experts, whose layers gather the tokens of all ranks."""
    mtp: Path | None = None
    """Its multi-token prediction draft (SGLang has the class from 0.5.13 on), as sparse as it."""


def default_directory() -> Path:
    """Where :func:`make_models` keeps models that nobody asked a place for."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sglang_dynspec" / "cpu_engine_models"


def make_models(directory: str | os.PathLike[str] | None = None, seed: int = 0) -> Models:
    """Make the models under ``directory`` unless they are there already.

    Safe to call from many processes at once: each writes to a temporary directory and renames it;
    whoever comes second uses the first one's.

    Args:
        directory: default :func:`default_directory`.
        seed: another seed gives other tables and so another text.
    """
    base = default_directory() if directory is None else Path(directory)
    home = base / f"recipe{_RECIPE}-seed{seed}"
    names = [field.name for field in fields(Models)]
    models = Models(**{name: home / name for name in names})
    if home.is_dir():
        return models
    base.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=base))
    try:
        _write_all(scratch, seed)
        scratch.chmod(0o755)
        scratch.rename(home)
    except OSError:
        if not home.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return models


def _write_all(home: Path, seed: int) -> None:
    weights = _Weights(seed)
    _write_model(
        home / "target",
        weights.target(),
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=_TARGET_LAYERS,
    )
    _write_model(
        home / "eagle",
        weights.eagle(),
        architectures=["LlamaForCausalLMEagle"],
        num_hidden_layers=1,
    )
    _write_model(
        home / "eagle3",
        weights.eagle3(),
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=VOCAB_SIZE - DRAFT_VOCAB_OFFSET,
        eagle_config={
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        },
    )
    _write_model(
        home / "standalone",
        weights.standalone(),
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=_STANDALONE_LAYERS,
        hidden_size=_STANDALONE_HIDDEN_SIZE,
    )
    _write_model(
        home / "qwen3",
        weights.qwen3(),
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        num_hidden_layers=_TARGET_LAYERS,
    )
    sparse: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _EXPERTS_A_TOKEN,
        "moe_intermediate_size": _INTERMEDIATE,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    _write_model(
        home / "qwen3_moe",
        weights.qwen3_moe(),
        architectures=["Qwen3MoeForCausalLM"],
        num_hidden_layers=_TARGET_LAYERS,
        **sparse,
    )
    _write_model(
        home / "mtp",
        weights.mtp(),
        architectures=["Qwen3MoeForCausalLMMTP"],
        num_hidden_layers=1,
        **sparse,
    )
    for target in ("target", "qwen3", "qwen3_moe"):
        _write_tokenizer(home / target)


class _Weights:
    """Builds the state dicts. Every tensor is float32; linear weights are [out, in]."""

    def __init__(self, seed: int) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator().manual_seed(seed)
        self._tables = self._make_tables()
        self._embedding = self._make_embedding()
        self._head = self._make_head()

    # --- the models -------------------------------------------------------------------------------
    def target(self) -> dict[str, Any]:
        weights = {
            "model.embed_tokens.weight": self._embedding,
            "model.norm.weight": self._norm(_TARGET_NORM2),
            "lm_head.weight": self._head,
        }
        for layer in range(_TARGET_LAYERS):
            prefix = f"model.layers.{layer}."
            norm2 = {0: _EMBEDDING_NORM2, 1: _LAYER1_NORM2}.get(layer, _TARGET_NORM2)
            weights[prefix + "input_layernorm.weight"] = self._norm(norm2)
            weights[prefix + "post_attention_layernorm.weight"] = self._norm(_TARGET_NORM2)
            if layer == 0:
                attention = self._lag_heads()
            elif layer == 1:
                attention = self._content_heads()
            else:
                attention = self._random_heads()
            # No noise before the heads that compare kinds: scores there must be exact.
            mlp = self._random_mlp(0.0 if layer == 0 else _NOISE)
            weights.update({f"{prefix}self_attn.{k}": v for k, v in attention.items()})
            weights.update({f"{prefix}mlp.{k}": v for k, v in mlp.items()})
        return weights

    def qwen3(self) -> dict[str, Any]:
        """The target with queries and keys that are normalised: only their directions matter.

        Heads by rule keep their proportions, and are sharp enough at the least of their scales.
        """
        weights = self.target()
        for layer in range(_TARGET_LAYERS):
            query = {0: _LAG_QUERY, 1: _KIND_QUERY}.get(layer)
            weights.update(self._query_key_norms(f"model.layers.{layer}.self_attn.", query))
        return weights

    def qwen3_moe(self) -> dict[str, Any]:
        """The Qwen3 target with experts for MLPs, each of them some random block of its own."""
        weights = {name: w for name, w in self.qwen3().items() if ".mlp." not in name}
        for layer in range(_TARGET_LAYERS):
            scale = 0.0 if layer == 0 else _NOISE
            weights.update(self._experts(f"model.layers.{layer}.mlp.", scale))
        return weights

    def eagle(self) -> dict[str, Any]:
        """EAGLE: hidden = fc([embedding, hidden]); shares embedding and head with the target."""
        bias = self._zeros(_HIDDEN_SIZE)
        bias[_LAYOUT["e"][0]] = 1.0
        weights = {
            "fc.weight": self._token_and_hidden(),
            "fc.bias": bias,
            "embed_tokens.weight": self._embedding,
            "layers.0.post_attention_layernorm.weight": self._norm(_TARGET_NORM2),
        }
        mlp = self._random_mlp(_NOISE)
        weights.update({f"layers.0.self_attn.{k}": v for k, v in self._content_heads().items()})
        weights.update({f"layers.0.mlp.{k}": v for k, v in mlp.items()})
        return weights

    def mtp(self) -> dict[str, Any]:
        """Multi-token prediction: EAGLE's rule, with norms all over and experts for an MLP.

        The classes of SGLang share embedding and head with the target.
        """
        fc = self._token_and_hidden()
        fc[_LAYOUT["e"][0], _LAYOUT["one"][0]] = 1.0  # for EAGLE's bias
        layer = "mtp.layers.0."
        weights = {
            "mtp.fc.weight": fc,
            "mtp.pre_fc_norm_embedding.weight": self._norm(_EMBEDDING_NORM2),
            "mtp.pre_fc_norm_hidden.weight": self._norm(_TARGET_NORM2),
            "mtp.norm.weight": self._norm(_MTP_NORM2 + 2),  # and b, c
            f"{layer}input_layernorm.weight": self._norm(_MTP_NORM2),
            f"{layer}post_attention_layernorm.weight": self._norm(_MTP_NORM2 + 2),
        }
        attention = self._content_heads()
        weights.update({f"{layer}self_attn.{k}": v for k, v in attention.items()})
        weights.update(self._query_key_norms(f"{layer}self_attn.", _KIND_QUERY))
        weights.update(self._experts(f"{layer}mlp.", _NOISE))
        return weights

    def eagle3(self) -> dict[str, Any]:
        """EAGLE-3: attention reads [norm(embedding), norm(hidden)] and adds to the raw hidden.

        The hidden is the target's (through fc) or the draft's own of the step before, and still
        holds that step's digits: a head that attends to its own position swaps old for new.
        """
        fc = self._zeros(_HIDDEN_SIZE, 3 * _HIDDEN_SIZE)
        for name in (*_DIGITS, "in_c", "in_d"):
            self._copy(fc, name, name, source_offset=2 * _HIDDEN_SIZE)
        hidden = _HIDDEN_SIZE  # where the hidden half of attention's input starts
        heads = _HeadBuilder(self._torch, in_size=2 * _HIDDEN_SIZE)
        heads.value(0, "a", ("a", 0, 1.0), ("a", hidden, -1.0))
        heads.value(0, "b", ("b", hidden, -1.0))
        heads.value(0, "c", ("c", hidden, -1.0))
        heads.value(0, "d", ("in_d", hidden, 1.0), ("d", hidden, -1.0))
        heads.value(0, "e", ("e", hidden, -1.0))
        heads.value(0, "in_c", ("in_c", 0, 1.0), ("in_c", hidden, -1.0))
        heads.value(0, "in_d", ("in_d", 0, 1.0), ("in_d", hidden, -1.0))
        heads.constant(0, "e", 1.0)
        heads.value(1, "b", ("in_b", 0, 1.0))
        heads.value(1, "c", ("in_c", hidden, 1.0))
        heads.attend_back(0, 0, {name: name for name in (*_DIGITS, "in_c", "in_d")})
        heads.attend_kind(2, "b", {"b": "b"})
        heads.attend_kind(3, "c", {"c": "c"})
        vocab = VOCAB_SIZE - DRAFT_VOCAB_OFFSET
        weights = {
            "fc.weight": fc,
            "norm.weight": self._norm(_DRAFT_NORM2),
            "lm_head.weight": self._head[DRAFT_VOCAB_OFFSET:].clone(),
            "d2t": self._torch.full((vocab,), DRAFT_VOCAB_OFFSET, dtype=self._torch.int64),
            "t2d": self._torch.arange(VOCAB_SIZE) >= DRAFT_VOCAB_OFFSET,
            "midlayer.input_layernorm.weight": self._norm(_EMBEDDING_NORM2),
            "midlayer.hidden_norm.weight": self._norm(_DRAFT_NORM2),
            "midlayer.post_attention_layernorm.weight": self._norm(_DRAFT_NORM2),
        }
        mlp = self._random_mlp(_NOISE)
        weights.update({f"midlayer.self_attn.{k}": v for k, v in heads.weights().items()})
        weights.update({f"midlayer.mlp.{k}": v for k, v in mlp.items()})
        return weights

    def standalone(self) -> dict[str, Any]:
        """A small Llama: the target's first two layers, without the look 37 back and the noise."""
        embedding = self._embedding.clone()
        embedding[:, _LAYOUT["e"][0]] = 1.0
        embedding[:, _LAYOUT["noise"]] = 0.0
        norms = (_EMBEDDING_NORM2 + 1, _LAYER1_NORM2)
        attention = (self._previous_head(), self._content_heads())
        weights = {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": self._norm(_TARGET_NORM2),
            "lm_head.weight": self._head,
        }
        for layer in range(_STANDALONE_LAYERS):
            prefix = f"model.layers.{layer}."
            weights[prefix + "input_layernorm.weight"] = self._norm(norms[layer])
            weights[prefix + "post_attention_layernorm.weight"] = self._norm(_TARGET_NORM2)
            mlp = self._random_mlp(0.0 if layer == 0 else _NOISE)
            weights.update({f"{prefix}self_attn.{k}": v for k, v in attention[layer].items()})
            weights.update({f"{prefix}mlp.{k}": v for k, v in mlp.items()})
        return {name: _without_noise(name, weight) for name, weight in weights.items()}

    # --- parts ------------------------------------------------------------------------------------
    def _make_tables(self) -> dict[str, Any]:
        """For each digit, which value each of the 512 tokens asks for: int64 [512]."""
        torch = self._torch
        tables = {"a": torch.randint(1, _DIGITS["a"], (VOCAB_SIZE,), generator=self._generator)}
        for digit in "bcd":
            tables[digit] = torch.randint(_DIGITS[digit], (VOCAB_SIZE,), generator=self._generator)
        order = torch.randperm(VOCAB_SIZE, generator=self._generator)
        tables["e"] = (order >= round(_E_IS_ZERO * VOCAB_SIZE)).long()
        return tables

    def _make_embedding(self) -> Any:
        torch = self._torch
        embedding = self._zeros(VOCAB_SIZE, _HIDDEN_SIZE)
        tokens = torch.arange(VOCAB_SIZE)
        for digit, table in self._tables.items():
            place = _LAYOUT[digit if digit == "a" else f"in_{digit}"]
            embedding[tokens, place.start + table] = 1.0
        embedding[:, _LAYOUT["one"][0]] = 1.0
        for name in ("key_b", "key_c", "query_b", "query_c"):
            bits = torch.randint(2, (VOCAB_SIZE, len(_LAYOUT[name])), generator=self._generator)
            embedding[:, _LAYOUT[name].start : _LAYOUT[name].stop] = 2.0 * bits - 1.0
        noise = torch.randn(VOCAB_SIZE, len(_LAYOUT["noise"]), generator=self._generator)
        embedding[:, _LAYOUT["noise"].start :] = (
            noise / noise.norm(dim=-1, keepdim=True) * math.sqrt(_NOISE_NORM2)
        )
        return embedding

    def _make_head(self) -> Any:
        """Logit = LOGIT_GAP * (how many of the token's digits the hidden state names)."""
        torch = self._torch
        head = self._zeros(VOCAB_SIZE, _HIDDEN_SIZE)
        tokens = torch.arange(VOCAB_SIZE)
        rest = tokens.clone()
        for digit in reversed(_DIGITS):
            head[tokens, _LAYOUT[digit].start + rest % _DIGITS[digit]] = LOGIT_GAP
            rest = rest // _DIGITS[digit]
        head[:DRAFT_VOCAB_OFFSET] = 0.0
        return head

    def _lag_heads(self) -> dict[str, Any]:
        heads = _HeadBuilder(self._torch, in_size=_HIDDEN_SIZE)
        for name in ("in_c", "in_d", "in_e"):
            heads.value(0, name, (name, 0, 1.0))
        heads.attend_back(0, 1, {"d": "in_d", "before_c": "in_c"})
        heads.attend_back(1, _E_LAG, {"e": "in_e"})
        return heads.weights()

    def _previous_head(self) -> dict[str, Any]:
        heads = _HeadBuilder(self._torch, in_size=_HIDDEN_SIZE)
        for name in ("in_c", "in_d"):
            heads.value(0, name, (name, 0, 1.0))
        heads.attend_back(0, 1, {"d": "in_d", "before_c": "in_c"})
        return heads.weights()

    def _content_heads(self) -> dict[str, Any]:
        heads = _HeadBuilder(self._torch, in_size=_HIDDEN_SIZE)
        heads.value(0, "b", ("in_b", 0, 1.0))
        heads.value(1, "c", ("before_c", 0, 1.0))
        heads.attend_kind(0, "b", {"b": "b"})
        heads.attend_kind(2, "c", {"c": "c"})
        return heads.weights()

    def _random_heads(self) -> dict[str, Any]:
        """Attention over the whole context that moves every logit a little."""
        return {
            "q_proj.weight": self._linear(_HEADS * _HEAD_DIM, _HIDDEN_SIZE, 1.0),
            "k_proj.weight": self._linear(_KV_HEADS * _HEAD_DIM, _HIDDEN_SIZE, 1.0),
            "v_proj.weight": self._linear(_KV_HEADS * _HEAD_DIM, _HIDDEN_SIZE, 1.0),
            "o_proj.weight": self._linear(_HIDDEN_SIZE, _HEADS * _HEAD_DIM, _NOISE),
        }

    def _query_key_norms(self, prefix: str, query: float | None) -> dict[str, Any]:
        """Norms of heads by rule with queries of this root mean square; None: of random heads."""
        key = 1.0
        if query is not None:
            # Of a key's elements the constants count, and they are all 1 or -1.
            key = math.sqrt((len(_LAG_PAIRS) + 1 + _KIND_BITS) / _HEAD_DIM)
        return {
            f"{prefix}k_norm.weight": self._torch.full((_HEAD_DIM,), key),
            f"{prefix}q_norm.weight": self._torch.full((_HEAD_DIM,), query or 1.0),
        }

    def _token_and_hidden(self) -> Any:
        """What a draft takes from [embedding of the token, hidden state before it]."""
        fc = self._zeros(_HIDDEN_SIZE, 2 * _HIDDEN_SIZE)
        for name in ("a", "in_b", "in_c", "in_d", "key_b", "key_c", "query_b", "query_c", "one"):
            self._copy(fc, name, name)
        self._copy(fc, "d", "in_d", source_offset=_HIDDEN_SIZE)
        self._copy(fc, "before_c", "in_c", source_offset=_HIDDEN_SIZE)
        return fc

    def _experts(self, prefix: str, scale: float) -> dict[str, Any]:
        """Random blocks, and a router that has each token go to some of them."""
        weights = {f"{prefix}gate.weight": self._linear(_EXPERTS, _HIDDEN_SIZE, 2.0)}
        for expert in range(_EXPERTS):
            mlp = self._random_mlp(scale)
            weights.update({f"{prefix}experts.{expert}.{k}": v for k, v in mlp.items()})
        return weights

    def _random_mlp(self, scale: float) -> dict[str, Any]:
        return {
            "gate_proj.weight": self._linear(_INTERMEDIATE, _HIDDEN_SIZE, 2.0),
            "up_proj.weight": self._linear(_INTERMEDIATE, _HIDDEN_SIZE, 2.0),
            "down_proj.weight": self._linear(_HIDDEN_SIZE, _INTERMEDIATE, scale),
        }

    def _copy(self, matrix: Any, to: str, source: str, source_offset: int = 0) -> None:
        for row, column in zip(_LAYOUT[to], _LAYOUT[source], strict=True):
            matrix[row, source_offset + column] = 1.0

    def _norm(self, norm2: float) -> Any:
        """RMSNorm weight that leaves a hidden state of this squared norm as it is."""
        return self._torch.full((_HIDDEN_SIZE,), math.sqrt(norm2 / _HIDDEN_SIZE))

    def _linear(self, out_size: int, in_size: int, scale: float) -> Any:
        weight = self._torch.randn(out_size, in_size, generator=self._generator)
        return weight * (scale / math.sqrt(in_size))

    def _zeros(self, *shape: int) -> Any:
        return self._torch.zeros(*shape)


class _HeadBuilder:
    """Attention weights whose heads attend by rule. Head i reads KV head i * 2 // 4.

    Every key holds the same: 1 in the pairs for distance, and the kinds of the position's token in
    theirs. What a head looks at is chosen by its query; what it fetches by the value and output.
    """

    def __init__(self, torch: Any, *, in_size: int) -> None:
        self._torch = torch
        self._frequency = _ROPE_THETA ** (-torch.arange(_HEAD_DIM // 2) / (_HEAD_DIM // 2))
        self._q = torch.zeros(_HEADS, _HEAD_DIM, in_size)
        self._k = torch.zeros(_KV_HEADS, _HEAD_DIM, in_size)
        self._v = torch.zeros(_KV_HEADS, _HEAD_DIM, in_size)
        self._o = torch.zeros(_HIDDEN_SIZE, _HEADS, _HEAD_DIM)
        self._places: list[dict[str, range]] = [{} for _ in range(_KV_HEADS)]
        self._one = _LAYOUT["one"][0]
        self._k[:, [*_LAG_PAIRS, _RECENCY_PAIR], self._one] = 1.0
        for digit, pairs in _KIND_PAIRS.items():
            for pair, dimension in zip(pairs, _LAYOUT[f"key_{digit}"], strict=True):
                self._k[:, pair, dimension] = 1.0

    def value(self, kv_head: int, name: str, *terms: tuple[str, int, float]) -> None:
        """Append to the value, as ``name``, the sum of factor * input[offset + place of part]."""
        places = self._places[kv_head]
        start = sum(len(place) for place in places.values())
        places[name] = range(start, start + len(_LAYOUT[terms[0][0]]))
        for part, offset, factor in terms:
            for row, dimension in zip(places[name], _LAYOUT[part], strict=True):
                self._v[kv_head, row, offset + dimension] += factor

    def constant(self, kv_head: int, name: str, amount: float) -> None:
        """Add a constant to the first element of a part of the value."""
        self._v[kv_head, self._places[kv_head][name][0], self._one] += amount

    def attend_back(self, head: int, lag: int, outputs: dict[str, str]) -> None:
        """Attend ``lag`` positions back; outputs: {part of the hidden state: part of the value}."""
        pairs = list(_LAG_PAIRS)
        angle = self._frequency[pairs] * lag
        self._set_query(head, pairs, _LAG_SCORE * angle.cos(), -_LAG_SCORE * angle.sin())
        self._set_output(head, outputs)

    def attend_kind(self, head: int, digit: str, outputs: dict[str, str]) -> None:
        """Attend to the latest position of the kind that the current token's query names."""
        self._set_query(head, [_RECENCY_PAIR], 0.0, _RECENCY_SCORE)
        pairs, bits = _KIND_PAIRS[digit], _LAYOUT[f"query_{digit}"]
        for pair, dimension in zip(pairs, bits, strict=True):
            self._q[head, pair, dimension] = _KIND_SCORE * math.sqrt(_HEAD_DIM)
        self._set_output(head, outputs)

    def weights(self) -> dict[str, Any]:
        return {
            "q_proj.weight": self._q.flatten(0, 1),
            "k_proj.weight": self._k.flatten(0, 1),
            "v_proj.weight": self._v.flatten(0, 1),
            "o_proj.weight": self._o.flatten(1, 2),
        }

    def _set_query(self, head: int, pairs: list[int], first: Any, second: Any) -> None:
        scale = math.sqrt(_HEAD_DIM)  # attention divides by it
        self._q[head, pairs, self._one] = first * scale
        self._q[head, [pair + _HEAD_DIM // 2 for pair in pairs], self._one] = second * scale

    def _set_output(self, head: int, outputs: dict[str, str]) -> None:
        places = self._places[head * _KV_HEADS // _HEADS]
        for target, name in outputs.items():
            for dimension, row in zip(_LAYOUT[target], places[name], strict=True):
                self._o[dimension, head, row] = 1.0


def _without_noise(name: str, weight: Any) -> Any:
    """A weight of a model whose hidden states are too short for the noise."""
    size = _STANDALONE_HIDDEN_SIZE
    if name.endswith("norm.weight"):
        norm2 = float(weight[0]) ** 2 * _HIDDEN_SIZE - _NOISE_NORM2
        return weight[:size].clone().fill_(math.sqrt(norm2 / size))
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return weight[:size]
    return weight[:, :size]


def _write_model(directory: Path, weights: dict[str, Any], **config: Any) -> None:
    from safetensors.torch import save_file

    directory.mkdir()
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    ids = {
        "bos_token_id": _SPECIAL_TOKENS["<s>"],
        "eos_token_id": _SPECIAL_TOKENS["</s>"],
        "pad_token_id": _SPECIAL_TOKENS["<pad>"],
    }
    _write_json(
        directory / "config.json",
        {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": _HIDDEN_SIZE,
            "intermediate_size": _INTERMEDIATE,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": _HEAD_DIM,
            "max_position_embeddings": _MAX_POSITIONS,
            "rms_norm_eps": _RMS_EPS,
            "rope_theta": _ROPE_THETA,
            "vocab_size": VOCAB_SIZE,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "attention_bias": False,
            "mlp_bias": False,
            **ids,
            **config,
        },
    )
    _write_json(directory / "generation_config.json", ids)


def _write_tokenizer(directory: Path) -> None:
    """Words "w4" to "w511" and four specials, split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = dict(_SPECIAL_TOKENS)
    vocab.update({f"w{i}": i for i in range(len(_SPECIAL_TOKENS), VOCAB_SIZE)})
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "model_max_length": _MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Command line of ``python -m sglang_dynspec.testing.models``."""
    parser = argparse.ArgumentParser(description="Make the CPU engine's tiny models.")
    parser.add_argument("directory", nargs="?", default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    models = make_models(options.directory, seed=options.seed)
    print(*vars(models).values(), sep="\n")


if __name__ == "__main__":
    main()

"""Train the small model pair whose draft really predicts: a byte-level Llama and its EAGLE-3 head.

The text is the source of Python's standard library, which is on every machine that can run this;
every twentieth file is held out. The target is trained on it, then the head on the target, as
EAGLE-3 (arXiv 2503.01840) does: the head is unrolled over its own outputs, because that is what it
is given when it drafts, and each step is taught the target's distribution.

``python tests/trained_pair/train.py DIRECTORY`` writes ``target/`` and ``eagle3/`` in Hugging Face
layout, and ``figures.json``: what was trained how, and how often the head is right on the files
that were held out. About an hour on two cores that do nothing else. Needs torch, safetensors,
tokenizers and rich. ``measure.py`` beside it measures what the head is worth on the real scheduler.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
SPECIAL_TOKENS = {"<s>": 256, "</s>": 257, "<unk>": 258, "<pad>": 259}
VOCAB = BYTES + len(SPECIAL_TOKENS)
DOCUMENT_END = SPECIAL_TOKENS["</s>"]
# A head of 64 runs on every attention backend; 4 and 2 heads split over 2 GPUs.
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 256, 4, 4, 2, 64, 512
ROPE_THETA, MAX_POSITIONS, NORM_EPS = 100_000.0, 8192, 1e-6
# Outputs of these layers are what the head is given (SGLang takes them at the entry of the next).
AUXILIARY_LAYERS = (0, 1, 2)
UNROLLED = 4  # draft steps the head is trained for
UNROLLED_DECAY = 0.8


@dataclass(frozen=True)
class Phase:
    """Some training: ``steps`` updates with ``batch`` crops of ``length`` bytes each."""

    steps: int
    batch: int
    length: int
    learning_rate: float


# The long crops come last: they teach positions, not text.
TARGET_PHASES = (Phase(1400, 16, 512, 3e-3), Phase(80, 3, 4096, 5e-4))
HEAD_PHASES = (Phase(900, 8, 512, 2e-3), Phase(60, 2, 2048, 4e-4))


# --- text -----------------------------------------------------------------------------------------
def library_files() -> tuple[list[Path], list[Path]]:
    """The standard library's modules without its tests: those to train on, those held out."""
    home = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = sorted(
        path for path in home.rglob("*.py") if not skipped & set(path.relative_to(home).parts)
    )
    held_out = [path for path in files if _is_held_out(path.relative_to(home).as_posix())]
    return [path for path in files if path not in set(held_out)], held_out


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def read_tokens(files: list[Path]) -> Tensor:
    """All files as one int64 tensor of bytes, each ended by ``</s>``."""
    tokens: list[int] = []
    for path in files:
        tokens.extend(path.read_bytes())
        tokens.append(DOCUMENT_END)
    return torch.tensor(tokens)


def crops(tokens: Tensor, phase: Phase, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches [batch, length + 1] from random places."""
    reach = torch.arange(phase.length + 1)
    for _ in range(phase.steps):
        starts = torch.randint(len(tokens) - len(reach), (phase.batch, 1), generator=generator)
        yield tokens[starts + reach]


# --- models ---------------------------------------------------------------------------------------
def rotate(states: Tensor, offset: int = 0) -> Tensor:
    """RoPE (halves, as Llama in SGLang) over [batch, heads, length, head_dim]."""
    half = HEAD_DIM // 2
    frequency = ROPE_THETA ** (-torch.arange(half) / half)
    angle = (torch.arange(states.shape[-2]) + offset)[:, None] * frequency
    first, second = states[..., :half], states[..., half:]
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )


class Attention(nn.Module):
    """Projections of grouped-query attention."""

    def __init__(self, in_size: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(in_size, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(in_size, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(in_size, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def project(self, states: Tensor, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [batch, HEADS, length, head_dim], positions from ``offset`` on."""
        query = self.q_proj(states).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        key = self.k_proj(states).unflatten(-1, (KV_HEADS, HEAD_DIM)).transpose(1, 2)
        value = self.v_proj(states).unflatten(-1, (KV_HEADS, HEAD_DIM)).transpose(1, 2)
        group = HEADS // KV_HEADS
        return (
            rotate(query, offset),
            rotate(key, offset).repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
        )

    def output(self, attended: Tensor) -> Tensor:
        """From [batch, heads, length, head_dim] back to hidden states."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        gated: Tensor = self.down_proj(
            functional.silu(self.gate_proj(states)) * self.up_proj(states)
        )
        return gated


class Layer(nn.Module):
    """A Llama layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.self_attn = Attention(HIDDEN)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.mlp = Mlp()

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = self.self_attn.project(self.input_layernorm(states))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.self_attn.output(attended)
        after: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return after


class Target(nn.Module):
    """Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, length, VOCAB] and the head's features [batch, length, 3 * HIDDEN]."""
        states = self.embed_tokens(tokens)
        features = []
        for index, layer in enumerate(self.layers):
            states = layer(states)
            if index in AUXILIARY_LAYERS:
                features.append(states)
        return self.lm_head(self.norm(states)), torch.cat(features, -1)


class Head(nn.Module):
    """EAGLE-3's draft: one layer over [norm(embedding), norm(features)]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(len(AUXILIARY_LAYERS) * HIDDEN, HIDDEN, bias=False)
        self.input_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.hidden_norm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.self_attn = Attention(2 * HIDDEN)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.mlp = Mlp()
        self.norm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def unroll(self, embeddings: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Logits of each draft step, as they are when SGLang drafts from every position at once.

        Args:
            embeddings: of the text, [batch, length, HIDDEN].
            features: of the target at each position, [batch, length, 3 * HIDDEN].
            steps: how many tokens to draft.

        Returns:
            ``steps`` tensors [batch, length - steps, VOCAB]; number s, row i proposes token
            i + 2 + s from the text up to i + 1 + s. Row i is a chain of its own: its step s sees
            the first step's keys up to i, as the draft's KV holds them, and its own since.
        """
        rows = embeddings.shape[1] - steps
        hidden = self.fc(features[:, :rows])
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        first_key: Tensor | None = None
        first_value: Tensor | None = None
        own: list[tuple[Tensor, Tensor]] = []
        logits = []
        for step in range(steps):
            embedding = self.input_layernorm(embeddings[:, 1 + step : 1 + step + rows])
            states = torch.cat((embedding, self.hidden_norm(hidden)), -1)
            query, key, value = self.self_attn.project(states, offset=step)
            if first_key is None or first_value is None:
                first_key, first_value = key, value
            else:
                own.append((key, value))
            attended = _attend(query, first_key, first_value, causal, own)
            hidden = hidden + self.self_attn.output(attended)
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def _attend(
    query: Tensor, key: Tensor, value: Tensor, causal: Tensor, own: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of each row to the keys up to it, and to its own later ones."""
    if not own:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    scale = 1 / math.sqrt(HEAD_DIM)
    shared = (query @ key.transpose(-1, -2) * scale).masked_fill(~causal, -math.inf)
    mine = [(query * own_key).sum(-1, keepdim=True) * scale for own_key, _ in own]
    weights = torch.cat((shared, *mine), -1).softmax(-1)
    rows = key.shape[-2]
    attended = weights[..., :rows] @ value
    for index, (_, own_value) in enumerate(own):
        attended = attended + weights[..., rows + index, None] * own_value
    return attended


# --- training -------------------------------------------------------------------------------------
def train(
    name: str,
    model: nn.Module,
    tokens: Tensor,
    phases: tuple[Phase, ...],
    loss_of: Callable[[Tensor], Tensor],
    generator: torch.Generator,
) -> None:
    """Minimise ``loss_of(crops)`` over the model's parameters; each phase ends at a rate of 0."""
    with Progress() as progress:
        task = progress.add_task(name, total=sum(phase.steps for phase in phases))
        for phase in phases:
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.05
            )
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, phase.learning_rate, total_steps=phase.steps, pct_start=0.05
            )
            for number, batch in enumerate(crops(tokens, phase, generator)):
                loss = loss_of(batch)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                progress.advance(task)
                if number % 100 == 0:
                    progress.console.print(f"{name} {number:5d}: loss {loss.item():.3f}")


def target_loss(target: Target, batch: Tensor) -> Tensor:
    logits, _ = target(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def head_loss(target: Target, head: Head, batch: Tensor) -> Tensor:
    """Cross entropy to the target's own distribution, of all draft steps."""
    with torch.no_grad():
        logits, features = target(batch)
        wanted = logits.softmax(-1)
        embeddings = target.embed_tokens(batch)
    total = torch.zeros(())
    for step, drafted in enumerate(head.unroll(embeddings, features, UNROLLED)):
        taught = wanted[:, 1 + step : 1 + step + drafted.shape[1]]
        total = total + UNROLLED_DECAY**step * functional.cross_entropy(
            drafted.flatten(0, 1), taught.flatten(0, 1)
        )
    return total


# --- figures --------------------------------------------------------------------------------------
@torch.no_grad()
def target_bits(target: Target, tokens: Tensor) -> float:
    """Bits a byte on held-out text."""
    batch = tokens[: len(tokens) // 513 * 513].view(-1, 513)[:256]
    return target_loss(target, batch).item() / math.log(2)


@torch.no_grad()
def head_accuracy(target: Target, head: Head, tokens: Tensor) -> list[float]:
    """How often each draft step names the target's own greedy token, on held-out text."""
    batch = tokens[: len(tokens) // 512 * 512].view(-1, 512)[:64]
    logits, features = target(batch)
    best = logits.argmax(-1)
    drafted = head.unroll(target.embed_tokens(batch), features, UNROLLED)
    return [
        (each.argmax(-1) == best[:, 1 + step : 1 + step + each.shape[1]]).float().mean().item()
        for step, each in enumerate(drafted)
    ]


# --- writing --------------------------------------------------------------------------------------
def write_model(directory: Path, weights: dict[str, Tensor], **config: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    shared = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": SPECIAL_TOKENS["<s>"],
        "eos_token_id": SPECIAL_TOKENS["</s>"],
        "pad_token_id": SPECIAL_TOKENS["<pad>"],
    }
    write_json(directory / "config.json", {**shared, **config})


def write_target(directory: Path, target: Target) -> None:
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": weight
        for name, weight in target.state_dict().items()
    }
    write_model(directory, weights, architectures=["LlamaForCausalLM"], num_hidden_layers=LAYERS)
    write_tokenizer(directory)


def write_head(directory: Path, head: Head) -> None:
    outside = ("fc.", "norm.", "lm_head.")
    weights = {
        name if name.startswith(outside) else f"midlayer.{name}": weight
        for name, weight in head.state_dict().items()
    }
    write_model(
        directory,
        weights,
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=VOCAB,
        eagle_config={
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(AUXILIARY_LAYERS),
        },
    )


def write_tokenizer(directory: Path) -> None:
    """A token is a byte; its id is the byte's value."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = _byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    vocab.update(SPECIAL_TOKENS)
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
        },
    )


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a ByteLevel tokenizer, in the bytes' order.

    Bytes that print in Latin-1 stand for themselves, the others for characters from U+0100 on
    (the alphabet of GPT-2, which Hugging Face's ByteLevel uses).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small model pair of the tests.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="the stored pair is of a CPU")
    options = parser.parse_args()
    torch.set_default_device(options.device)
    torch.manual_seed(options.seed)
    generator = torch.Generator(options.device).manual_seed(options.seed)
    started = time.monotonic()
    training, held_out = library_files()
    text, unseen = read_tokens(training), read_tokens(held_out)

    target = Target()
    _start_small(target)
    train(
        "target", target, text, TARGET_PHASES, lambda batch: target_loss(target, batch), generator
    )
    target.requires_grad_(False)
    _round_weights(target)  # the head learns from the target as it is stored
    write_target(options.directory / "target", target)

    head = Head()
    _start_small(head)
    head.lm_head.load_state_dict(target.lm_head.state_dict())
    train("head", head, text, HEAD_PHASES, lambda batch: head_loss(target, head, batch), generator)
    _round_weights(head)
    write_head(options.directory / "eagle3", head)

    accuracy = head_accuracy(target, head, unseen)
    figures = {
        "text": f"standard library of Python {platform.python_version()}",
        "bytes": len(text),
        "held_out": [path.name for path in held_out],
        "held_out_bytes": len(unseen),
        "seed": options.seed,
        "torch": torch.__version__,
        "parameters": {
            "target": sum(weight.numel() for weight in target.parameters()),
            "eagle3": sum(weight.numel() for weight in head.parameters()),
        },
        "target_phases": [asdict(phase) for phase in TARGET_PHASES],
        "head_phases": [asdict(phase) for phase in HEAD_PHASES],
        "bits_a_byte": round(target_bits(target, unseen), 3),
        "head_accuracy_by_step": [round(rate, 3) for rate in accuracy],
        "seconds": round(time.monotonic() - started),
    }
    write_json(options.directory / "figures.json", figures)
    print(json.dumps({k: v for k, v in figures.items() if k != "held_out"}, indent=1))


def _start_small(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.04 / (math.sqrt(2 * LAYERS) if into_stream else 1))


def _round_weights(model: nn.Module) -> None:
    """To bfloat16, as they are stored."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16))


if __name__ == "__main__":
    main()

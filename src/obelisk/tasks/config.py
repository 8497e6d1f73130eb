"""Transformer configurations: what a Hugging Face `config.json` says, as a frozen record.

Takes a decoded JSON object or a model directory; gives a `ModelConfig`. It promises to refuse what
it does not know (model type, rotary scaling, activation, sliding window below the context) by name
and with the supported values, and never to fall back to a default that changes the answer.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import ParseError, UnknownName, UserError


class Family(enum.StrEnum):
    """The supported values of `model_type`."""

    LLAMA = "llama"  # also SmolLM and SmolLM2
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class RopeType(enum.StrEnum):
    """The supported rotary scalings."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base, and the scaling of the inverse frequencies.

    Attributes:
        theta: the base.
        kind: which scaling.
        factor: divisor of (low) frequencies.
        low, high: llama3's frequency factors.
        original: llama3's original context length.
    """

    theta: float
    kind: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with grouped heads, RMS norms and a gated MLP (SiLU).

    Attributes:
        family: the model type.
        hidden: width of the residual stream.
        layers: decoder layers.
        heads, kv_heads, head_dim: attention; `heads * head_dim` need not equal `hidden`.
        ffn: width of the MLP.
        vocab: number of token ids.
        eps: epsilon of every RMS norm.
        rope: rotary embedding.
        tied: the head is the embedding.
        qkv_bias, o_bias, mlp_bias: which products add a bias.
        qk_norm: RMS norm of every query and key head (qwen3).
        max_positions: the longest context the model was made for.
        eos: token ids that end a sequence.
    """

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 1 << 20
    eos: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads

    @property
    def q_width(self) -> int:
        """Elements of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def digest(self) -> str:
        """Changes with every field that changes the tokens."""
        return digest("model", json.dumps(self.to_json(), sort_keys=True))

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {**asdict(self), "eos": list(self.eos)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_json`."""
        rope = dict(data["rope"])
        rope["kind"] = RopeType(rope["kind"])
        rest = {k: v for k, v in data.items() if k not in ("family", "rope", "eos")}
        return ModelConfig(
            family=Family(data["family"]), rope=Rope(**rope), eos=tuple(data["eos"]), **rest
        )


_DEFAULT_THETA = 10000.0
_REQUIRED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"
)  # fmt: skip


def _number(data: Mapping[str, Any], key: str, source: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ParseError(f"{source}: {key} is {value!r}, expected a positive integer")
    return value


def _family(data: Mapping[str, Any], source: str) -> Family:
    name = data.get("model_type")
    try:
        return Family(str(name))
    except ValueError:
        known = ", ".join(Family)
        raise UnknownName(
            f"{source}: model_type {name!r} is not supported: known are {known} "
            "(dense decoders with grouped heads, rotary embedding, RMS norm and a gated SiLU MLP)"
        ) from None


def parse_rope(data: Mapping[str, Any], source: str) -> Rope:
    """The rotary embedding of a configuration, in either spelling.

    `rope_scaling` beside `rope_theta` (older files), or both in `rope_parameters` (newer ones).
    Raises `UnknownName` for a scaling that is not supported, `ParseError` for a missing figure.
    """
    newer = data.get("rope_parameters") or {}
    scaling = {**newer, **(data.get("rope_scaling") or {})}
    raw_theta = data.get("rope_theta", newer.get("rope_theta"))
    theta = float(_DEFAULT_THETA if raw_theta is None else raw_theta)
    name = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        kind = RopeType(str(name))
    except ValueError:
        raise UnknownName(
            f"{source}: rope_type {name!r} is not supported: known are {', '.join(RopeType)}"
        ) from None
    if kind is RopeType.DEFAULT:
        return Rope(theta)
    needed = ("factor",) if kind is RopeType.LINEAR else (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    )  # fmt: skip
    for key in needed:
        if not isinstance(scaling.get(key), int | float):
            raise ParseError(f"{source}: rope scaling {kind} needs {key}, got {scaling.get(key)!r}")
    if kind is RopeType.LINEAR:
        return Rope(theta, kind, float(scaling["factor"]))
    return Rope(
        theta,
        kind,
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling["original_max_position_embeddings"]),
    )


def _eos(data: Mapping[str, Any]) -> tuple[int, ...]:
    raw = data.get("eos_token_id")
    if raw is None:
        return ()
    return tuple(int(x) for x in raw) if isinstance(raw, list) else (int(raw),)


def parse_config(data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The configuration of a decoded `config.json`; `source` names the file in errors.

    Raises `UnknownName` (model type, rotary scaling, activation) and `ParseError` (a figure that is
    missing, or impossible).
    """
    family = _family(data, source)
    for key in _REQUIRED:
        _number(data, key, source)
    heads, hidden = int(data["num_attention_heads"]), int(data["hidden_size"])
    kv_heads = heads if data.get("num_key_value_heads") is None else _number(
        data, "num_key_value_heads", source
    )  # fmt: skip
    if heads % kv_heads:
        raise ParseError(f"{source}: {heads} heads are no multiple of {kv_heads} key-value heads")
    if data.get("head_dim") is not None:
        head_dim = _number(data, "head_dim", source)
    elif hidden % heads:
        raise ParseError(f"{source}: hidden_size {hidden} / {heads} heads is no head_dim; give one")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise ParseError(f"{source}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    act = data.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnknownName(f"{source}: hidden_act {act!r} is not supported: known is silu")
    if data.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnknownName(f"{source}: partial_rotary_factor other than 1 is not supported")
    attention_bias = bool(data.get("attention_bias", False))
    positions = int(data.get("max_position_embeddings") or 1 << 20)
    window = data.get("sliding_window")
    if window is not None and (family is Family.MISTRAL or data.get("use_sliding_window", False)):
        positions = min(positions, int(window))  # within the window, attention is the full one
    return ModelConfig(
        family=family,
        hidden=hidden,
        layers=int(data["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=int(data["intermediate_size"]),
        vocab=int(data["vocab_size"]),
        eps=float(data.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(data, source),
        tied=bool(data.get("tie_word_embeddings", False)),
        qkv_bias=family is Family.QWEN2 or attention_bias,
        o_bias=attention_bias and family in (Family.LLAMA, Family.QWEN3),
        mlp_bias=bool(data.get("mlp_bias", False)),
        qk_norm=family is Family.QWEN3,
        max_positions=positions,
        eos=_eos(data),
    )


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a model directory; raises `UserError` where there is no `config.json`,
    and what `parse_config` raises.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: give a Hugging Face model directory")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ParseError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ParseError(f"{path} holds a {type(data).__name__}, expected an object")
    return parse_config(data, str(path))

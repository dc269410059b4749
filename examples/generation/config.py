"""What a `config.json` in Hugging Face's format says about a decoder: Llama, Qwen2, Qwen3 and Gemma-2."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder's static facts.

    Attributes:
      windows: of each layer how many tokens a token sees, itself included; None for all.
      rope_scaling: as the file has it, of the types "default", "linear" and "llama3".
    """

    family: str
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    context: int
    windows: tuple[int | None, ...]
    epsilon: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    end_tokens: tuple[int, ...] = ()
    dtype: str = "float32"

    @property
    def gemma(self) -> bool:
        return self.family == "gemma2"


# what transformers takes where a file says nothing, or null
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "hidden_act": "silu", "eos_token_id": 2},
    "qwen2": {"max_position_embeddings": 32768, "hidden_act": "silu", "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "hidden_act": "silu", "num_key_value_heads": 32, "head_dim": 128},
    "gemma2": {
        "max_position_embeddings": 8192, "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4,
        "head_dim": 256, "eos_token_id": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip


def from_json(facts: dict[str, Any]) -> Config:
    """The decoder that a `config.json` describes; fields that are missing or null are what transformers has for them.

    Raises:
      ValueError: naming the field that is missing or of another kind, or what this program does not have.
    """
    family = facts.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {family!r}")
    usual, gemma = DEFAULTS[family], family == "gemma2"

    def number(name: str, otherwise: Any = None, kind=int):
        return _number(facts, name, usual.get(name, otherwise), kind)

    width, heads, layers = number("hidden_size"), number("num_attention_heads"), number("num_hidden_layers")
    # null is as many as there are query heads, but in Gemma-2; a field that is missing is what the family has
    as_many = facts.get("num_key_value_heads", ()) is None and not gemma
    kv_heads = heads if as_many else number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}")
    if width % heads and facts.get("head_dim") is None and "head_dim" not in usual:
        raise ValueError(f"hidden_size must be a multiple of num_attention_heads, got {width} and {heads}")
    head_size = number("head_dim", width // heads)
    if head_size % 2:
        raise ValueError(f"head_dim must be even, got {head_size}")
    activation_field = "hidden_activation" if gemma else "hidden_act"
    activation = _default(facts, activation_field, usual[activation_field])
    if activation not in ACTIVATIONS:
        raise ValueError(f"{activation_field} must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if gemma and _flag(facts, "use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention must be false, got True")
    dtype = _default(facts, "dtype", _default(facts, "torch_dtype", "float32"))
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    bias, context = _flag(facts, "attention_bias"), number("max_position_embeddings")
    theta, scaling = _rope(facts, context)
    return Config(
        family=family,
        vocabulary=number("vocab_size"),
        width=width,
        inner=number("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        context=context,
        windows=_windows(facts, family, layers),
        epsilon=number("rms_norm_eps", 1e-6, float),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=_flag(facts, "tie_word_embeddings", gemma),
        qkv_bias=family == "qwen2" or bias,
        out_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and _flag(facts, "mlp_bias"),
        activation=activation,
        scale=number("query_pre_attn_scalar", 256, float) ** -0.5 if gemma else None,
        attention_cap=_cap(facts, "attn_logit_softcapping", 50.0) if gemma else None,
        logits_cap=_cap(facts, "final_logit_softcapping", 30.0) if gemma else None,
        end_tokens=_tokens(facts.get("eos_token_id", usual.get("eos_token_id"))),
        dtype=dtype,
    )


def to_json(config: Config) -> dict[str, Any]:
    """The `config.json` of a Llama, as this program's own training makes them."""
    if config.family != "llama" or config.rope_scaling or config.qkv_bias or config.mlp_bias:
        raise ValueError(f"only plain Llamas are written, got {config}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.epsilon,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": config.activation,
        "attention_bias": False,
        "eos_token_id": list(config.end_tokens),
        "bos_token_id": None,
        "torch_dtype": config.dtype,
    }


def load(folder: Path) -> Config:
    """Of a folder; `generation_config.json` has the last word on what ends a text.

    Raises:
      ValueError: naming the file.
    """
    path = folder / "config.json"
    try:
        config = from_json(read_json(path))
        path = folder / "generation_config.json"
        if path.is_file():
            ends = _tokens(read_json(path).get("eos_token_id"))
            config = dataclasses.replace(config, end_tokens=ends or config.end_tokens)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return config


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is no JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def frequencies(config: Config) -> list[float]:
    """Radians per token of each pair of channels (arXiv:2104.09864), scaled as Llama 3.1's model card has it where
    the file says so."""
    size, scaling = config.head_size, dict(config.rope_scaling)
    plain = [config.rope_theta ** (-2 * i / size) for i in range(size // 2)]
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return [x / scaling["factor"] for x in plain]
    if kind == "llama3":
        low, high, old = (
            scaling[x] for x in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )

        def scaled(x):
            turns = old * x / (2 * math.pi)  # in the context that the model first had
            share = min(max((turns - low) / (high - low), 0.0), 1.0)
            return x * (share + (1 - share) / scaling["factor"])

        return [scaled(x) for x in plain]
    return plain


def _default(facts: dict[str, Any], name: str, otherwise: Any) -> Any:
    found = facts.get(name)
    return otherwise if found is None else found


def _number(facts: dict[str, Any], name: str, otherwise: Any = None, kind: type = float, least: int = 1) -> Any:
    """A whole number from `least` on, or where `kind` is float, one above 0 whose powers are finite."""
    found = _default(facts, name, otherwise)
    fits = isinstance(found, (int, kind)) and not isinstance(found, bool)
    if not fits or not (1e-300 < found < 1e300 if kind is float else least <= found < 2**31):
        raise ValueError(f"{name} must be a {'positive' if least else 'non-negative'} {kind.__name__}, got {found!r}")
    return found


def _flag(facts: dict[str, Any], name: str, otherwise: bool = False) -> bool:
    found = _default(facts, name, otherwise)
    if not isinstance(found, bool):
        raise ValueError(f"{name} must be true or false, got {found!r}")
    return found


def _rope(facts: dict[str, Any], context: int) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """Base and scaling, in the older or the newer way of writing them."""
    field = "rope_parameters" if facts.get("rope_scaling") in (None, {}) else "rope_scaling"
    scaling = _default(facts, field, {})
    if not isinstance(scaling, dict):
        raise ValueError(f"{field} must be an object, got {scaling!r}")
    if any(isinstance(x, dict) for x in scaling.values()):
        raise ValueError(f"{field} must be of all layers alike, got {scaling!r}")
    if _default({**facts, **scaling}, "partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor must be 1: the decoder rotates all channels")
    theta = _number({"rope_theta": _default(scaling, "rope_theta", facts.get("rope_theta"))}, "rope_theta", 10_000.0)
    kind = _default(scaling, "rope_type", _default(scaling, "type", "default"))
    name = "original_max_position_embeddings"
    scaling = {**scaling, name: _default(facts, name, _default(scaling, name, context))}
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if not isinstance(kind, str) or kind not in needed:
        raise ValueError(f"{field} must be of the type {', '.join(needed)}, got {kind!r}")
    try:
        values = tuple((name, _number(scaling, name)) for name in needed[kind])
    except ValueError as error:
        raise ValueError(f"{field} must have a number {error}") from None
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError(f"{field} must have low_freq_factor below high_freq_factor, got {scaling!r}")
    return float(theta), () if kind == "default" else (("rope_type", kind), *values)


def _windows(facts: dict[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    gemma = family == "gemma2"
    if family == "llama" or not (gemma or _flag(facts, "use_sliding_window")):
        return (None,) * layers
    if facts.get("sliding_window", 4096) is None:
        return (None,) * layers
    window, kinds = _number(facts, "sliding_window", 4096, int), facts.get("layer_types")
    if kinds is None:
        first = 0 if gemma else _number(facts, "max_window_layers", 28, int, least=0)
        return tuple(window if (i % 2 == 0 if gemma else i >= first) else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types must be a list of {layers} entries, got {kinds!r}")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ValueError(f"layer_types must be sliding_attention or full_attention, got {kind!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _cap(facts: dict[str, Any], name: str, otherwise: float) -> float | None:
    return None if facts.get(name, otherwise) is None else float(_number(facts, name, otherwise))


def _tokens(x: Any) -> tuple[int, ...]:
    found = [] if x is None else x if isinstance(x, list) else [x]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in found):
        raise ValueError(f"eos_token_id must be a token, a list of tokens, or null, got {x!r}")
    return tuple(found)

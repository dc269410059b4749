"""What a `config.json` in Hugging Face's format says about a decoder: Llama, Qwen2, Qwen3 and Gemma-2."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


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


def from_json(facts: dict[str, Any]) -> Config:
    """The decoder that a `config.json` describes.

    Raises:
      ValueError: naming what is missing, or what this program does not have.
    """
    family = facts.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {family!r}")

    def number(name: str, otherwise: Any = None, kind=int):
        x = facts.get(name)
        x = otherwise if x is None else x
        if isinstance(x, bool) or not isinstance(x, (int, kind)) or x <= 0:
            raise ValueError(f"{name} must be a positive {kind.__name__}, got {x!r}")
        return x

    width, heads, layers = number("hidden_size"), number("num_attention_heads"), number("num_hidden_layers")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}")
    head_size = number("head_dim", {"qwen3": 128, "gemma2": 256}.get(family, width // heads))
    if head_size % 2:
        raise ValueError(f"head_dim must be even, got {head_size}")
    activation = facts.get("hidden_activation") or facts.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    gemma, bias = family == "gemma2", bool(facts.get("attention_bias", False))
    theta, scaling = _rope(facts)
    return Config(
        family=family,
        vocabulary=number("vocab_size"),
        width=width,
        inner=number("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        context=number("max_position_embeddings", 2048),
        windows=_windows(facts, family, layers),
        epsilon=number("rms_norm_eps", 1e-6, float),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(facts.get("tie_word_embeddings", gemma)),
        qkv_bias=family == "qwen2" or bias,
        out_bias=family != "qwen2" and bias,
        mlp_bias=bool(facts.get("mlp_bias", False)),
        activation=activation,
        scale=number("query_pre_attn_scalar", 256, float) ** -0.5 if gemma else None,
        attention_cap=_cap(facts, "attn_logit_softcapping", 50.0) if gemma else None,
        logits_cap=_cap(facts, "final_logit_softcapping", 30.0) if gemma else None,
        end_tokens=_tokens(facts.get("eos_token_id")),
        dtype=str(facts.get("dtype") or facts.get("torch_dtype") or "float32"),
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
    config = from_json(read_json(folder / "config.json"))
    if (folder / "generation_config.json").is_file():
        ends = _tokens(read_json(folder / "generation_config.json").get("eos_token_id"))
        config = dataclasses.replace(config, end_tokens=ends or config.end_tokens)
    return config


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
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


def _rope(facts: dict[str, Any]) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """Base and scaling, in the older or the newer way of writing them."""
    scaling = dict(facts.get("rope_parameters") or facts.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", facts.get("rope_theta", 10_000.0))
    kind = scaling.setdefault("rope_type", scaling.pop("type", "default"))
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in needed:
        raise ValueError(f"rope_scaling must be of the type {', '.join(needed)}, got {kind!r}")
    for name in needed[kind]:
        if not isinstance(scaling.get(name), (int, float)):
            raise ValueError(f"rope_scaling must have a number {name}, got {scaling.get(name)!r}")
    facts = tuple((name, scaling[name]) for name in ("rope_type", *needed[kind]))
    return float(theta), () if kind == "default" else facts


def _windows(facts: dict[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = facts.get("sliding_window")
    if family == "gemma2":
        window = 4096 if window is None else window
    elif family == "llama" or not facts.get("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * layers
    kinds = facts.get("layer_types")
    if kinds is None:
        first = facts.get("max_window_layers", 28)
        slides = [i % 2 == 0 if family == "gemma2" else i >= first for i in range(layers)]
    elif len(kinds) != layers:
        raise ValueError(f"layer_types must have {layers} entries, got {len(kinds)}")
    else:
        slides = [kind == "sliding_attention" for kind in kinds]
    return tuple(int(window) if x else None for x in slides)


def _cap(facts: dict[str, Any], name: str, otherwise: float) -> float | None:
    cap = facts.get(name, otherwise)
    return None if cap is None else float(cap)


def _tokens(x: Any) -> tuple[int, ...]:
    return () if x is None else tuple(x) if isinstance(x, list) else (int(x),)

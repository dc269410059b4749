"""A Llama-style decoder in flax nnx: RMSNorm, rotary positions, grouped queries, gated feed-forward.

The decoder knows nothing of caches or batches: it is given tokens, their positions and an `attend` function, and any
leading axes. Modules and parameters have the names that `transformers` gives them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_mfa
from generation.config import Config, frequencies

# (layer, query, key, value, and by name scale, local_window_size, logits_soft_cap) → what the values give
Attend = Callable[..., Any]


def whole(implementation: str | None = None) -> Attend:
    """Causal attention of whole sequences `[..., T, N, H]`, for training and scoring."""
    return lambda layer, q, k, v, **facts: jax_mfa.dot_product_attention(
        q, k, v, is_causal=True, implementation=implementation, **facts
    )


class RMSNorm(nnx.Module):
    """arXiv:1910.07467, in float32; Gemma's weights are what is added to 1."""

    def __init__(self, size: int, config: Config, dtype):
        self.weight = nnx.Param(jnp.zeros(size, dtype) if config.gemma else jnp.ones(size, dtype))
        self.epsilon, self.gemma = config.epsilon, config.gemma

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        if self.gemma:
            return (wide * (1 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
        return self.weight[...] * wide.astype(x.dtype)


def rotate(x, positions, config: Config):
    """Rotary position embedding of `[..., N, H]` at `positions` `[...]`, halves paired."""
    angles = positions[..., None, None].astype(jnp.float32) * np.array(frequencies(config), np.float32)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: Config, layer: int, dtype, rngs: nnx.Rngs):
        self.config, self.layer = config, layer
        linear = functools.partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        size = config.head_size
        self.q_proj = linear(config.width, config.heads * size, use_bias=config.qkv_bias)
        self.k_proj = linear(config.width, config.kv_heads * size, use_bias=config.qkv_bias)
        self.v_proj = linear(config.width, config.kv_heads * size, use_bias=config.qkv_bias)
        self.o_proj = linear(config.heads * size, config.width, use_bias=config.out_bias)
        if config.family == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(size, config, dtype), RMSNorm(size, config, dtype)

    def __call__(self, x, positions, attend: Attend):
        config = self.config
        window = config.windows[self.layer]
        heads = lambda y: y.reshape(*y.shape[:-1], -1, config.head_size)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        if config.family == "qwen3":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, positions, config), rotate(k, positions, config)
        out = attend(
            self.layer, q, k, v,
            scale=config.scale,
            local_window_size=None if window is None else (window - 1, 0),
            logits_soft_cap=config.attention_cap,
        )  # fmt: skip
        return self.o_proj(out.reshape(*out.shape[:-2], -1))


class FeedForward(nnx.Module):
    def __init__(self, config: Config, dtype, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.gate_proj = linear(config.width, config.inner)
        self.up_proj = linear(config.width, config.inner)
        self.down_proj = linear(config.inner, config.width)
        self.activation = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}[config.activation]

    def __call__(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: Config, layer: int, dtype, rngs: nnx.Rngs):
        self.gemma = config.gemma
        norm = lambda: RMSNorm(config.width, config, dtype)
        self.self_attn = Attention(config, layer, dtype, rngs)
        self.mlp = FeedForward(config, dtype, rngs)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        if self.gemma:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    def __call__(self, x, positions, attend: Attend):
        seen = self.self_attn(self.input_layernorm(x), positions, attend)
        if self.gemma:  # what a part gives is normalised too
            x = x + self.post_attention_layernorm(seen)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + seen
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Tokens `[...]` at `positions` `[...]` to vectors `[..., width]`; `logits` makes `[..., vocabulary]` of these."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.config = config
        self.embed_tokens = nnx.Embed(config.vocabulary, config.width, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, i, dtype, rngs) for i in range(config.layers)])
        self.norm = RMSNorm(config.width, config, dtype)
        if not config.tied:
            self.lm_head = nnx.Linear(
                config.width, config.vocabulary, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
            )

    def __call__(self, tokens, positions, attend: Attend, policy: Any = None):
        """With a policy of `jax.checkpoint`, the backward pass computes again what it does not save of a layer."""
        x = self.embed_tokens(tokens)
        if self.config.gemma:
            x = x * jnp.asarray(self.config.width**0.5, x.dtype)
        for layer in self.layers:
            if policy is None:
                x = layer(x, positions, attend)
            else:
                graph, state = nnx.split(layer)
                run = lambda state, x, graph=graph: nnx.merge(graph, state)(x, positions, attend)
                x = jax.checkpoint(run, policy=policy)(state, x)
        return self.norm(x)

    def logits(self, x):
        """float32 `[..., vocabulary]`."""
        y = (self.embed_tokens.attend(x) if self.config.tied else self.lm_head(x)).astype(jnp.float32)
        cap = self.config.logits_cap
        return y if cap is None else cap * jnp.tanh(y / cap)

    @property
    def dtype(self):
        return self.embed_tokens.embedding[...].dtype

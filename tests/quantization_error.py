"""How far quantised attention is from attention, scheme by scheme: `python tests/quantization_error.py` prints the
table of docs/caches.md.

The schemes are simulated in plain numpy, which shares no line with the package; tests hold the package to the figures.
"""

from __future__ import annotations

import dataclasses

import numpy as np

S, H = 1024, 64


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A scheme, as `jax_mfa.Scheme`; None for all tokens or channels."""

    kind: str
    symmetric: bool = False
    tokens: int | None = 1
    channels: int | None = 32
    center: int | None = None

    @property
    def label(self) -> str:
        block = "all" if self.tokens is None else f"{self.tokens} × {self.channels or 'H'}"
        center = f", centred over {self.center}" if self.center else ""
        return f"{self.kind} {'symmetric' if self.symmetric else 'asymmetric'}, {block}{center}"

    def bytes(self) -> float:
        """Of each number in 16 bits, how many are stored."""
        size = (self.tokens or S) * (self.channels or H)
        bits = {"int8": 8, "int4": 4, "fp8": 8}[self.kind] + (16 if self.symmetric else 32) / size
        return (bits + (16 / self.center if self.center else 0)) / 16


def e4m3(x):
    """Numbers to four significant bits, those below 2⁻⁶ to multiples of 2⁻⁹."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-300))), -6)
    step = 2.0 ** (exponent - 3)
    return np.clip(np.rint(x / step) * step, -448, 448)


def round_trip(x, scheme: Simulated):
    """What `x` [S, H] becomes."""
    out = np.empty(x.shape)
    if scheme.center:
        for start in range(0, len(x), scheme.center):
            part = x[start : start + scheme.center]
            mean = part.mean(0)
            out[start : start + scheme.center] = (
                round_trip(part - mean, dataclasses.replace(scheme, center=None)) + mean
            )
        return out
    tokens, channels = scheme.tokens or x.shape[0], scheme.channels or x.shape[1]
    for i in range(0, x.shape[0], tokens):
        for j in range(0, x.shape[1], channels):
            at = slice(i, i + tokens), slice(j, j + channels)
            block = x[at]
            low, high = block.min(), block.max()
            if low == high:
                out[at] = block
            elif scheme.kind == "fp8":
                zero = 0 if scheme.symmetric else (low + high) / 2
                scale = np.abs(block - zero).max() / 448
                out[at] = e4m3((block - zero) / scale) * scale + zero
            elif scheme.symmetric:
                scale = np.abs(block).max() / {"int8": 127, "int4": 7}[scheme.kind]
                out[at] = np.rint(block / scale) * scale
            else:
                scale = (high - low) / {"int8": 255, "int4": 15}[scheme.kind]
                out[at] = np.rint((block - low) / scale) * scale + low
    return out


def numbers(distribution: str, seed: int = 0):
    """Query, key and value, [S, H] each."""
    rng = np.random.default_rng([seed, *distribution.encode()])
    if distribution == "t3":
        return tuple(rng.standard_t(3, (S, H)) for _ in range(3))
    query, key, value = (rng.standard_normal((S, H)) for _ in range(3))
    if distribution == "outliers":  # a few channels of keys are large and far from 0, for all tokens
        key[:, ::16] = 8 + 3 * key[:, ::16]
    return query, key, value


def attention(query, key, value):
    x = query @ key.T / np.sqrt(query.shape[1])
    p = np.exp(x - x.max(1, keepdims=True))
    return p @ value / p.sum(1, keepdims=True)


def error(got, wanted) -> float:
    """Relative L2."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def errors(scheme: Simulated, distribution: str) -> tuple[float, float]:
    """Of a round trip of the keys, and of the output."""
    query, key, value = numbers(distribution)
    rounded = round_trip(key, scheme), round_trip(value, scheme)
    return error(rounded[0], key), error(attention(query, *rounded), attention(query, key, value))


DISTRIBUTIONS = ("gaussian", "t3", "outliers")
SCHEMES = (
    Simulated("int8"),
    Simulated("int8", channels=64),
    Simulated("int8", symmetric=True, channels=64),
    Simulated("int8", tokens=None, channels=None),
    Simulated("fp8", symmetric=True, channels=64),
    Simulated("int4"),
    Simulated("int4", channels=64),
    Simulated("int4", symmetric=True),
    Simulated("int4", tokens=64, channels=1),
    Simulated("int4", center=64),
    Simulated("int4", symmetric=True, center=64),
)


def main() -> None:
    print("| scheme | bytes of float16 |", *(f" {x}: keys | output |" for x in DISTRIBUTIONS), sep="")
    print("|---|---|" + "---|---|" * len(DISTRIBUTIONS))
    for scheme in SCHEMES:
        found = [f" {100 * key:.2f} % | {100 * out:.2f} % |" for key, out in (errors(scheme, x) for x in DISTRIBUTIONS)]
        print(f"| {scheme.label} | {scheme.bytes():.3f} |", *found, sep="")


if __name__ == "__main__":
    main()

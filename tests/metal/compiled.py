"""What a compiler for GPUs makes of the kernels: `python tests/metal/compiled.py` compiles every instantiation of the
tile tables to LLVM's intermediate representation and prints, for each kernel, what decides whether it can be fast.

The text is the one that Metal compiles, with `gpu/metal_stdlib` in place of Metal's headers: a simdgroup matrix is an
opaque value of 64 elements there, and what threads do together is a call. Clang optimises it as for a GPU (`-O2`); no
machine code is made. Counted is one round of the interior loop, whose tiles are wholly visible: every instruction of
its blocks once, those of an inner loop as often as the products of a tile say. Loops without products are left out:
they run only where tiles or heads change. Branches not taken are counted, so shares are estimates from below.

`apple.py` makes cycles of the counts, with constants from public figures; `published.py` says how well that agrees
with published times of another package's kernels. None of these kernels was seen on Apple hardware.

`PYTHONPATH=tests:tests/metal python -m jax_mfa bench --predict compiled` asks for the shares of its problems' kernels.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import apple  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import published  # noqa: E402
from emulator import build  # noqa: E402

from jax_mfa import metal  # noqa: E402
from jax_mfa.arguments import specify_abstract  # noqa: E402
from jax_mfa.cli import show  # noqa: E402
from jax_mfa.metal import tiles  # noqa: E402
from jax_mfa.metal.plan import ITEM_SIZES, Dispatch, Kernel, Plan  # noqa: E402

HEADERS = pathlib.Path(__file__).resolve().parent / "gpu"
TARGETS = ("spir64", "nvptx64-nvidia-cuda", "amdgcn-amd-amdhsa")
KERNELS = (
    "attention_forward",
    "attention_d_query",
    "attention_d_key_value",
    "attention_decode",
    "attention_decode_rows",
)
SCORES = KERNELS[:3]  # kernels whose interior loop is counted

# scalar instructions' cycles of a scheduler; from github.com/philipturner/metal-benchmarks where nothing else is said
CYCLES = {
    "float": apple.FLOAT_ARITHMETIC,  # multiply-add, add, comparison
    "maximum": 1,
    "exp2": 4,
    "special": 6,  # division, logarithm, tanh: about
    "integer": 1,  # 32-bit add, logic, comparison
    "multiply": 4,  # 32-bit integer multiply
    "wide": 4,  # 64-bit add; a 64-bit multiply takes 16
    "select": 1,
    "convert": 1,
    "shuffle": 2,  # and votes
    "store": 1,  # issue alone, assumed
    "branch": 1,  # assumed
    "barrier": 2,  # assumed
}
FAMILIES = {"staged": 7, "direct": 9}  # the model's family of a tile table
BYTES = 8  # of an instruction, on average: they have 2 to 14
CALLS = {
    "multiply": "matrix",
    "exp2": "exp2",
    "log2": "special",
    "tanh": "special",
    "shuffle": "shuffle",
    "simd": "shuffle",
    "barrier": "barrier",
    "load": "load",
    "store": "store",
}
FLOATS = ("fadd", "fsub", "fmul", "fneg", "fcmp")
INTEGERS = ("add", "sub", "and", "or", "xor", "shl", "lshr", "ashr", "icmp")
CONVERSIONS = ("fpext", "fptrunc", "sitofp", "uitofp", "fptosi", "fptoui")
_BLOCK = re.compile(r"^(?:([\w.]+|\"[^\"]+\"):|define )")
_TARGET = re.compile(r"label %([\w.]+)")
_LANES = re.compile(r"<(\d+) x ")
_LOADED = re.compile(r" = load (?:volatile )?(?:<(\d+) x )?(i\d+|half|bfloat|float|ptr)")


def text_of(plan: Plan, dispatch: Dispatch) -> str:
    """The program with a dispatch's constants written into it and Metal's attributes taken out."""
    text = show.program(plan).removesuffix(plan.instantiations)
    for index, name, kind, value in dispatch.kernel.constants:
        spelt = str(value).lower() if isinstance(value, bool) else str(value)
        text = text.replace(
            f"constant {kind} {name} [[function_constant({index})]];", f"constant constexpr {kind} {name} = {spelt};"
        )
    text = re.sub(
        r"^constant (\w+) (\w+) \[\[function_constant\(\d+\)\]\];", r"constant constexpr \1 \2 = 0;", text, flags=re.M
    )
    text = re.sub(r"^( +)threadgroup ([^*&()]+? \w+\[.*\];)$", r"\1static threadgroup \2", text, flags=re.M)
    text = re.sub(r"\b((?:float|uint|ulong)[234])\(", r"gpu_\1(", text)  # clang has no such constructors
    return re.sub(r"\[\[[^\]]*\]\]", "", text + dispatch.kernel.instantiation)


@functools.lru_cache(maxsize=256)
def representation(text: str, target: str = TARGETS[0], *more: str) -> str:
    """LLVM's intermediate representation of a program, optimised; `more` are flags."""
    with tempfile.TemporaryDirectory() as work:
        source, out = pathlib.Path(work, "program.cc"), pathlib.Path(work, "program.ll")
        source.write_text(text, encoding="utf-8")
        flags = [
            "-x",
            "c++",
            "-std=c++17",
            "-O2",
            "-ffp-contract=on",
            "-nostdinc",
            "-Wno-everything",
            f"-I{HEADERS}",
            *more,
        ]
        command = [build.zig(), "clang", f"--target={target}", *flags, "-S", "-emit-llvm", str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return out.read_text(encoding="utf-8")


def kind_of(line: str) -> tuple[str, int] | None:
    """The class of an instruction and how many it stands for; None for what costs nothing."""
    body = line.split(" = ", 1)[-1].strip()
    words = body.split()
    name = words[0] if words[0] not in ("tail", "notail", "musttail") else "call"
    lanes = int(found[1]) if (found := _LANES.search(body.split(",")[0])) else 1
    if name == "call":
        called = re.search(r"@(\w[\w.]*)", body)
        if called is None or called[1].startswith(("llvm.lifetime", "llvm.assume", "llvm.experimental")):
            return None
        if called[1].startswith("gpu_"):
            return CALLS[called[1].split("_")[1]], 1
        if re.match(r"llvm\.(maxnum|minnum|maximum|minimum)", called[1]):
            return "maximum", lanes
        if re.match(r"llvm\.(fma|fmuladd|fabs)", called[1]):
            return "float", lanes
        return "integer", lanes
    if name in FLOATS:
        return "float", lanes
    if name == "fdiv":
        return "special", lanes
    if name in INTEGERS or name == "mul":
        wide = " i64 " in f" {body} "
        return ("multiply" if name == "mul" and not wide else "wide" if wide else "integer"), lanes * (
            4 if name == "mul" and wide else 1
        )
    if name in CONVERSIONS:
        return "convert", lanes
    if name == "getelementptr":  # a constant offset is part of the access
        variable = re.search(r", i(?:32|64) %", body)
        return (("wide" if "addrspace(1)" in body else "integer"), 1) if variable else None
    if name in ("load", "store", "select"):
        return name, lanes if name == "select" else 1
    if name == "br" and body.startswith("br i1"):
        return "branch", 1
    return None


def loaded(line: str) -> int:
    """Bytes that a load brings to a lane."""
    count, kind = _LOADED.search(line).groups()
    sizes = {"half": 2, "bfloat": 2, "float": 4, "ptr": 8}
    return int(count or 1) * (sizes.get(kind) or -(-int(kind[1:]) // 8))


@dataclasses.dataclass(frozen=True)
class Graph:
    """The blocks of a function: their instructions, their successors, and its loops."""

    lines: dict[str, list[str]]
    successors: dict[str, list[str]]

    @classmethod
    def of(cls, ir: str) -> Graph:
        """Of the one function that a program defines, which is a kernel."""
        lines: dict[str, list[str]] = {}
        at = ""
        for line in ir[ir.index("\ndefine ") + 1 :].splitlines():
            if line.startswith("}"):
                break
            label = _BLOCK.match(line)
            if label:
                at = label[1] or "entry"
                lines[at] = []
            elif line.strip() and not line.lstrip().startswith((";", "#dbg")):
                lines[at].append(line.strip())
        successors = {name: _TARGET.findall(body[-1]) for name, body in lines.items()}
        return cls(lines, successors)

    def loops(self) -> list[frozenset[str]]:
        """Natural loops, the blocks of each; those with one head are one."""
        order, seen, stack = [], set(), [(next(iter(self.lines)), False)]
        while stack:
            name, done = stack.pop()
            if done:
                order.append(name)
            elif name not in seen:
                seen.add(name)
                stack.append((name, True))
                stack.extend((x, False) for x in self.successors[name])
        order.reverse()
        place = {name: i for i, name in enumerate(order)}
        before = collections.defaultdict(list)
        for name in order:
            for x in self.successors[name]:
                before[x].append(name)
        dominator = {order[0]: order[0]}
        changed = True
        while changed:
            changed = False
            for name in order[1:]:
                known = [x for x in before[name] if x in dominator]
                found = known[0]
                for x in known[1:]:
                    y = found
                    while x != y:
                        x, y = (dominator[x], y) if place[x] > place[y] else (x, dominator[y])
                    found = x
                if dominator.get(name) != found:
                    dominator[name], changed = found, True

        def dominates(x, y):
            while place[y] > place[x]:
                y = dominator[y]
            return x == y

        bodies: dict[str, set[str]] = {}
        for name in order:
            for head in self.successors[name]:
                if dominates(head, name):
                    body, work = bodies.setdefault(head, {head}), [name]
                    while work:
                        x = work.pop()
                        if x not in body:
                            body.add(x)
                            work.extend(before[x])
        return sorted(map(frozenset, bodies.values()), key=len)

    @functools.cached_property
    def folded(self) -> frozenset[str]:
        """Addresses that are part of the loads and stores that use them: a base and a 32-bit offset in a register, as
        the machine's own take them (dougallj.github.io/applegpu/docs.html, device_load)."""
        everything = [line for body in self.lines.values() for line in body]
        narrow = {line.split(" = ")[0] for line in everything if re.search(r" = (?:zext|sext)(?: nneg)? i32 ", line)}
        uses = collections.defaultdict(list)
        for line in everything:
            for name in re.findall(r"%[\w.]+", line.split(" = ", 1)[-1]):
                uses[name].append(line)
        found = set()
        for line in everything:
            index = re.search(r"^(%[\w.]+) = getelementptr .*, i64 (%[\w.]+)$", line)
            if index and index[2] in narrow and all(re.search(r"(?:= load|^store) ", x) for x in uses[index[1]]):
                found.add(index[1])
        return frozenset(found)

    def counted(self, blocks) -> collections.Counter:
        found: collections.Counter = collections.Counter()
        for line in (line for name in blocks for line in self.lines[name]):
            kind = kind_of(line)
            if kind and line.split(" = ")[0] not in self.folded:
                found[kind[0]] += kind[1]
            if kind and kind[0] == "matrix":
                found["single"] += "gpu_multiply_f32" in line
            if kind and kind[0] == "load":
                found["bytes"] += loaded(line) * apple.LANES
        return found


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What became of a kernel.

    Attributes:
      allocas: variables with an address: none may hold a fragment.
      instructions: in all, of intermediate code.
      interior: by class, of a tile; empty where the kernel has no such loop. Of products also those with an operand in
        float (`single`), of loads also the bytes of all lanes.
      code: instructions of the interior loop as they stand in the code.
      scores: 8 × 8 of a tile and simdgroup.
      rescaled: multiplications of the forward pass's sums, all independent of each other.
    """

    name: str
    allocas: int
    instructions: int
    interior: collections.Counter
    code: int
    scores: int
    rescaled: int = 0

    @property
    def work(self) -> apple.Work:
        n = self.interior
        scalar = sum(cycles * n[kind] for kind, cycles in CYCLES.items())
        scalar -= (CYCLES["float"] - apple.INDEPENDENT) * self.rescaled
        return apple.Work(
            half=n["matrix"] - n["single"], single=n["single"], scalar=scalar, loads=n["load"], bytes=n["bytes"]
        )

    def share(self, family: int) -> float:
        """Predicted, of the time in which the matrix unit works."""
        return apple.MODEL.share(self.work, family)


def tile_of(dispatch: Dispatch) -> tuple[int, int, int]:
    """Scores of a tile for a simdgroup, or a pair that shares keys, in fragments, the products that it takes, and its
    multiplications of sums."""
    function, types, blocks, _, others, *rest = dispatch.kernel.template
    sizes = [tiles.padded(int(x)) // 8 for x in re.findall(r"(\d+)>", types)[1:3]]
    slices = max(rest[-1], 1)
    parts = {
        "attention_forward": (1, 1 / slices),
        "attention_d_query": (1 + 1 / slices, 1),
        "attention_d_key_value": (1 + 1 / slices, 1 + 1 / slices),
    }[function]
    scores = blocks * others // 8
    rescaled = 2 * blocks * round(sizes[1] / slices) if function == SCORES[0] else 0
    return scores, round(scores * sum(x * part for x, part in zip(sizes, parts))), rescaled


def compiled(plan: Plan, dispatch: Dispatch, target: str = TARGETS[0]) -> Compiled:
    graph = Graph.of(representation(text_of(plan, dispatch), target))
    everything = graph.counted(graph.lines)
    allocas = sum(" = alloca " in line for body in graph.lines.values() for line in body)
    instructions = sum(map(len, graph.lines.values()))
    function = dispatch.kernel.template[0]
    if function not in SCORES:
        return Compiled(dispatch.kernel.name, allocas, instructions, collections.Counter(), 0, 0)
    scores, products, rescaled = tile_of(dispatch)
    loops = graph.loops()
    own = {loop: loop.difference(*(x for x in loops if x < loop)) for loop in loops}
    inner = max(loops, key=lambda loop: graph.counted(own[loop])["matrix"])
    counted = graph.counted(own[inner])
    rounds, left = divmod(products, counted["matrix"])
    assert left == 0 and everything["matrix"], (dispatch.kernel.name, products, counted["matrix"])
    interior = collections.Counter({kind: n * rounds for kind, n in counted.items()})
    blocks = set(own[inner])
    if rounds > 1:
        outer = min((x for x in loops if inner < x), key=len)
        interior += graph.counted(own[outer])
        blocks |= own[outer]
    if function == SCORES[2] and dispatch.kernel.template[-1]:  # products are shared by a pair, all else both do
        shared = ("matrix", "single", "load", "bytes")
        interior = collections.Counter({kind: n if kind in shared else 2 * n for kind, n in interior.items()})
    code = sum(len(graph.lines[name]) for name in blocks)
    return Compiled(dispatch.kernel.name, allocas, instructions, interior, code, scores, rescaled)


# what a core has for its simdgroups, and from how many on its arithmetic is busy: from the same benchmarks
REGISTER_FILE = 208 * 1024
THREADGROUP_MEMORY = 60 * 1024
BUSY = 24
OTHERS = 96  # bytes of registers for addresses, row maxima and sums and operands on their way: assumed


def resident(kernel: Kernel, fetched: int) -> int:
    """How many simdgroups of a kernel a core holds, by registers and threadgroup memory; `fetched`: bytes of registers
    for the tile on its way."""
    simdgroups = kernel.threads // 32
    registers = min(kernel.fragment_bytes + fetched + OTHERS, tiles.REGISTER_BYTES)
    groups = REGISTER_FILE // (32 * registers) // simdgroups
    if kernel.threadgroup_memory:
        groups = min(groups, THREADGROUP_MEMORY // kernel.threadgroup_memory)
    return groups * simdgroups


def alternatives(h: int, dtype: str, variant: str) -> str:
    """Markdown: tiles of a head size that fit, by the predicted share of the time in which the matrix units work.

    Staged tiles of which a core holds less than `BUSY` simdgroups are marked down; a core of family 9 held 1024 threads
    in every published row.
    """
    item, staged = ITEM_SIZES[dtype], int(variant == "staged")
    chosen = tiles.select(variant, h, h, item)
    backward = [
        (b, n, k, c, staged, True, kept)
        for b, n, k, c, kept in itertools.product((1, 2), (4, 8), (16, 32), (1, 2, 4), (True, False))
        if 8 * c <= k
    ]
    others = {
        "forward": [tiles.ForwardTiles(b, n, k, staged, True) for b in (1, 2) for n in (4, 8) for k in (16, 32, 64)],
        "d_query": [tiles.QueryTiles(*x) for x in backward],
        "d_key_value": [tiles.KeyTiles(*x, parts) for x in backward for parts in (0, 1)],
    }
    lines = [
        f"H = V = {h}, {dtype}, {variant}; predicted: matrix share, times simdgroups / {BUSY} where these are fewer",
        "",
        "| kernel | fragment bytes | threadgroup bytes | matrix share | simdgroups | predicted | |",
        "|---" * 7 + "|",
    ]
    for i, (name, candidates) in enumerate(others.items()):
        own = getattr(chosen, name)
        found = []
        for tile in dict.fromkeys([own, *candidates]):
            sizes = tile.fragment_bytes(h, h, item), tile.threadgroup_memory(h, h, item)
            if sizes[0] > tiles.FRAGMENT_BUDGET or sizes[1] > tiles.THREADGROUP_BYTES:
                continue
            plan, dispatch = kernels_of(dataclasses.replace(chosen, **{name: tile}), h, dtype)[i]
            known = compiled(plan, dispatch)
            if not known.interior:
                continue
            share = known.share(FAMILIES[variant])
            rows = getattr(tile, "keys", None) or tile.queries
            fetched = 2 * rows * h * item // dispatch.kernel.threads if tile.buffers else 0
            held = resident(dispatch.kernel, fetched) if staged else published.RESIDENT
            predicted = share * min(held / BUSY, 1)
            mark = "chosen" if tile == own else ""
            figures = (dispatch.kernel.name, *sizes, f"{share:.3f}", held, f"{predicted:.3f}", mark)
            found.append((predicted, f"| {' | '.join(map(str, figures))} |"))
        lines += [row for _, row in sorted(found, reverse=True)]
    return "\n".join(lines)


def matrix_shares(plan: Plan, variant: str) -> dict[str, tuple[float, float]]:
    """Predicted of each kernel of a plan whose interior loop is counted, with the model's relative error on published
    rows of the same family and size of operands that it was not fitted to."""
    family, shares = FAMILIES[variant], {}
    for dispatch in plan.dispatches:
        if dispatch.kernel.template[0] in SCORES and (found := compiled(plan, dispatch)).interior:
            item = 4 if found.work.half == 0 else 2
            shares[dispatch.kernel.template[0]] = found.share(family), published.error(family, item)
    return shares


def kernels_of(variant: str | tiles.Tiles, h: int, dtype: str = "float16", **masks) -> list[tuple[Plan, Dispatch]]:
    """Those of both passes of a dense problem."""
    x = jax.ShapeDtypeStruct((1, 512, 1, h), jnp.dtype(dtype))
    problem = specify_abstract(query=x, key=x, value=x, **masks)
    plans = [metal.plan_of(*problem, of_pass, variant) for of_pass in ("forward", "backward")]
    return [(plan, d) for plan in plans for d in plan.dispatches if d.kernel.template[0] in KERNELS]


def decoding(h: int, dtype: str = "float16", rows: int = 8) -> tuple[Plan, Dispatch]:
    query, key = (jax.ShapeDtypeStruct((1, t, n, h), jnp.dtype(dtype)) for t, n in ((rows // 2, 2), (1024, 1)))
    plan = metal.plan_of(*specify_abstract(query=query, key=key, value=key), "forward", "staged")
    return plan, plan.dispatches[0]


def table(target: str) -> str:
    """Markdown: a line for each entry of each table, at its largest head size, and what its interior costs a score."""
    shown = ["matrix", "load", "bytes", *(x for x in CYCLES if x not in ("special", "convert", "store"))]
    lines = [
        f"{target}; instructions of the interior loop for each score and lane; share of the matrix unit, predicted",
        "",
        "| kernel | allocas | instructions | interior bytes | " + " | ".join(shown) + " | matrix share |",
        "|---" * (len(shown) + 5) + "|",
    ]

    def add(x: Compiled, family: int = 7) -> None:
        figures = [f"{x.interior[kind] * 32 / (64 * x.scores):.2f}" if x.scores else "" for kind in shown]
        share = f"{x.share(family):.3f}" if x.scores else ""
        row = (x.name, x.allocas, x.instructions, x.code * BYTES or "", *figures, share)
        lines.append("| " + " | ".join(map(str, row)) + " |")

    for variant, entries in tiles.VARIANTS.items():
        for limit, item in entries:
            for plan, dispatch in kernels_of(variant, limit, "float16" if item == 2 else "float32"):
                add(compiled(plan, dispatch, target), FAMILIES[variant])
    for h in (64, 128):
        for rows in (2, 8):
            add(compiled(*decoding(h, rows=rows), target))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0])
    parser.add_argument("--alternatives", type=int, metavar="H", help="to the tiles of a head size, instead")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="of the alternatives")
    parser.add_argument("--variant", choices=tuple(FAMILIES), default="staged", help="of the alternatives")
    parser.add_argument("--published", action="store_true", help="published figures and predictions of them, instead")
    options = parser.parse_args()
    if options.published:
        print(published.table())
    elif options.alternatives:
        print(alternatives(options.alternatives, options.dtype, options.variant))
    else:
        print(table(options.target))


if __name__ == "__main__":
    main()

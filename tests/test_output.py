"""What users see is ASCII, and prints wherever standard output goes."""

import ast
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted(x for folder in ("jax_mfa", "examples") for x in (ROOT / folder).rglob("*.py"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# strings that nobody prints as they are
DATA = {
    "jax_mfa/cli/command_line.py": set("×·–−→…≤≠²ᵀ∞Σ√"),  # written in ASCII where the terminal lacks them
    "examples/generation/detokenizer.py": {"\N{REPLACEMENT CHARACTER}"},  # what bytes that are no UTF-8 decode to
    "examples/sentence_embeddings.py": {"\N{REPLACEMENT CHARACTER}"},  # drawn in a plot
}


def strings(tree: ast.Module) -> list[tuple[int, str]]:
    """Lines and text of all string constants but docstrings; the module's counts where a program prints it."""
    prints = any(isinstance(x, ast.Name) and x.id == "__doc__" for x in ast.walk(tree))
    documented = [x for x in ast.walk(tree) if isinstance(x, DOCUMENTED) and not (prints and x is tree)]
    docstrings = {x.body[0].value for x in documented if x.body and isinstance(x.body[0], ast.Expr)}
    constants = (x for x in ast.walk(tree) if isinstance(x, ast.Constant) and x not in docstrings)
    return [(x.lineno, x.value) for x in constants if isinstance(x.value, str)]


def test_strings_that_users_see_are_ascii():
    wrong = []
    for file in FILES:
        name = str(file.relative_to(ROOT))
        found = strings(ast.parse(file.read_text("utf-8")))
        wrong += [f"{name}:{at}: {x!r}" for at, x in found if not x.isascii() and x not in DATA.get(name, ())]
    assert len(FILES) > 90 and not wrong, "\n".join(wrong)


def test_the_programs_docstrings_are_ascii():
    """Those of the commands, which `python -m jax_mfa` prints."""
    for name in ("cli/bench", "cli/check", "cli/tune", "cli/show"):
        assert ast.get_docstring(ast.parse((ROOT / f"jax_mfa/{name}.py").read_text("utf-8"))).isascii(), name


def test_strings_of_native_code_are_ascii():
    files = sorted(x for kind in ("*.cc", "*.h") for x in (ROOT / "csrc").glob(kind))
    code = "".join(re.sub(r"//.*", "", x.read_text("utf-8")) for x in files)
    assert '"' in code and code.isascii()


def test_text_of_users_prints_too():
    """Prompts, sentences and file names, in programs that print them."""
    programs = [x for x in FILES if 'if __name__ == "__main__":' in x.read_text("utf-8")]
    for file in programs:
        mains = [x for x in ast.parse(file.read_text("utf-8")).body if getattr(x, "name", "") == "main"]
        assert ast.unparse(mains[0].body[0]) == "fit_output_to_the_terminal()", file
    assert len(programs) == 8


def test_choices_records_and_caches_print_where_output_is_ascii():
    code = """
import jax, jax.numpy as jnp, jax_mfa
x = jnp.ones((1, 8, 2, 4))
with jax_mfa.record() as seen:
    jax_mfa.dot_product_attention(x, x, x, implementation="blockwise")
print(seen, seen.prometheus(), *seen.choices)
print()
print(jax_mfa.explain(x, x, x), jax_mfa.explain_context_parallel(x, x, x, devices=2))
print(repr(jax_mfa.explain(x, x, x)), jax_mfa.quantize(x), jax_mfa.BlockMask.causal(8, 8, (4, 4)))
"""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "JAX_MFA_DEVICE": "none"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\n-> blockwise" in done.stdout and "tiles of 8 x 8" in done.stdout

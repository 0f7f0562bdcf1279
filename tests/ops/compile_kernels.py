"""Compile every kernel offline and report its resources as JSON: no torch, no GPU needed.

    python tests/ops/compile_kernels.py --arch 80 --arch 90 [--only NAME] > report.json
    python tests/ops/compile_kernels.py --write tests/ops/kernel_resources.json

Runs with any Triton from 3.0 on, so one script serves all environments. The kernels and the
shapes they are compiled for are in kernel_variants.py; the second form updates the committed
resources of the installed Triton version, which test_compile.py compares with.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
# shared memory that one block may have, bytes (CUDA programming guide, compute capabilities)
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}


def import_without_torch(module: str) -> types.ModuleType:
    """Import a kernel module without running its packages' ``__init__``, which need torch."""
    parts = module.split(".")
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(SOURCE.joinpath(*parts[:depth]))]
            sys.modules[name] = package
    return importlib.import_module(module)


def compile_variant(variant: dict, arch: int) -> dict:
    """Compile one variant and count what its machine code holds."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = import_without_torch(variant["module"])
    kernel = getattr(module, variant["kernel"])
    constants, options = variant["constants"], variant["options"]
    if callable(constants):  # choices that the op makes by Triton version
        constants, options = constants(module)
    defaults = {x.name: x.default for x in kernel.params if x.has_default}
    constants = {**defaults, **constants}
    signature, divisible = {}, []
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            continue
        signature[name] = variant["types"].get(name, "i32")
        if signature[name].startswith("*") or name.startswith("stride"):
            divisible.append(index)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 1):
        from triton.compiler.compiler import AttrsDescriptor

        source = ASTSource(kernel, signature, constants, AttrsDescriptor(set(divisible), set()))
    else:
        signature.update(dict.fromkeys(constants, "constexpr"))
        attrs = {(index,): [["tt.divisibility", 16]] for index in divisible}
        ordered = {name: signature[name] for name in kernel.arg_names}
        source = ASTSource(kernel, ordered, constants, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))
    return {
        "name": variant["name"],
        "arch": arch,
        "triton": ".".join(triton.__version__.split(".")[:2]),
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_LIMIT[arch],
        **machine_code(compiled.asm["cubin"]),
    }


def machine_code(cubin: bytes) -> dict:
    """Registers, stack and instruction counts of a cubin."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        sass = _output(tools / "cuobjdump", "-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    count = lambda pattern: len(re.findall(pattern, sass))  # noqa: E731
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "spill_stores": count(r"\bSTL\b|\bSTL\."),
        "spill_loads": count(r"\bLDL\b|\bLDL\."),
        "mma": count(r"\bHMMA\b|\bHMMA\.|\bHGMMA\b"),
        "page_loop_int_to_float": conversions_in_page_loop(sass),
        "instructions": count(r"/\*[0-9a-f]{4,5}\*/"),
    }


def conversions_in_page_loop(sass: str) -> int:
    """Integer-to-float conversions in the page loop: the loop with the most mma."""
    instructions = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)
    code = [(int(address, 16), text) for address, text in instructions]
    most, conversions = 0, 0
    for address, text in code:
        branch = re.search(r"\bBRA\S*.*0x([0-9a-f]+)", text)
        if branch is None or int(branch[1], 16) >= address:
            continue  # a loop ends with a jump back to its beginning
        body = [line for at, line in code if int(branch[1], 16) <= at <= address]
        products = sum("MMA" in line for line in body)
        if products > most:
            most, conversions = products, sum(bool(re.search(r"\bI2FP?\b", x)) for x in body)
    return conversions


def _output(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, action="append")
    parser.add_argument("--only", action="append", help="compile these variants alone")
    parser.add_argument("--write", type=Path, help="put the resources into this file")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from kernel_variants import VARIANTS

    rows = [
        compile_variant(variant, arch)
        for variant in VARIANTS
        if not arguments.only or variant["name"] in arguments.only
        for arch in arguments.arch or SHARED_LIMIT
    ]
    if arguments.write:
        write_resources(rows, arguments.write)
    else:
        json.dump(rows, sys.stdout, indent=1)


def write_resources(rows: list[dict], path: Path) -> None:
    """Update the file's entries for these rows, one line each."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for row in rows:
        key = f"triton {row['triton']} sm_{row['arch']} {row['name']}"
        known[key] = {name: row[name] for name in ("registers", "stack", "shared")}
    lines = [f" {json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

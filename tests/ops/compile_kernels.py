"""Compile every kernel offline and report its resources as JSON: no torch, no GPU needed.

    python tests/ops/compile_kernels.py --arch 80 --arch 90 [--only NAME] > report.json

Runs with any Triton from 3.0 on, so one script serves all environments. The kernels and the
shapes they are compiled for are in kernel_variants.py.
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

    kernel = getattr(import_without_torch(variant["module"]), variant["kernel"])
    constants = variant["constants"]
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
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options=dict(variant["options"])
    )
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
        "int_to_float": count(r"\bI2F\b|\bI2F\.|\bI2FP\."),
        "local_atomics": count(r"\bATOM"),
        "instructions": count(r"/\*[0-9a-f]{4,5}\*/"),
    }


def _output(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, action="append")
    parser.add_argument("--only", default="", help="compile variants whose name starts so")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from kernel_variants import VARIANTS

    rows = [
        compile_variant(variant, arch)
        for variant in VARIANTS
        if variant["name"].startswith(arguments.only)
        for arch in arguments.arch or SHARED_LIMIT
    ]
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

"""Set-up for all tests: where no GPU is found, Triton's kernels are loaded for its interpreter.

Only tests that ask for them run interpreted kernels; everything else takes the torch references.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import signal

import torch

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # child processes inherit "ignored"

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):  # absent in old versions; looks at the variable
        importlib.import_module("triton.experimental.gluon")
    import kitty.ops
    from kitty.ops import dispatch

    for module in pkgutil.walk_packages(kitty.ops.__path__, "kitty.ops."):
        importlib.import_module(module.name)
    dispatch._interpret = False
    del os.environ["TRITON_INTERPRET"]  # child processes must not inherit it

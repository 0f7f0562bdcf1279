"""What every measuring process needs, imported once by the server that they are forked from."""

from __future__ import annotations

import contextlib

from kitty.models import lean_imports

with contextlib.suppress(ImportError):  # then the measurement itself says what is missing
    lean_imports()
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import kitty.benchmark.measure  # noqa: F401

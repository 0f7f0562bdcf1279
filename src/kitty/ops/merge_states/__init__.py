"""merge_states: attention over disjoint parts of the keys, joined by their log-sum-exps."""

import torch
from torch import Tensor

from kitty.errors import KittyError
from kitty.ops.dispatch import on_device_of, runs_kernel
from kitty.ops.merge_states.reference import merge_states_reference


def merge_states(
    outputs: Tensor, lse: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the union of S disjoint sets of keys.

    Args:
        outputs: ``[..., S, D]`` contiguous, each part's attention output; fp32 for the kernel.
        lse: ``[..., S]`` fp32 natural logarithms of the sums of exponentials; -inf for a part
            without keys, whose output may hold anything.
        dtype: of the result; None keeps that of ``outputs``.

    Returns:
        ``[..., D]`` and fp32 ``[...]``; zeros and -inf where no part has a key.

    Raises:
        KittyError: shapes do not fit.
    """
    if outputs.shape[:-1] != lse.shape or outputs.dim() < 2:
        raise KittyError(
            f"outputs {tuple(outputs.shape)} and lse {tuple(lse.shape)} do not fit: "
            "give [..., S, D] and [..., S]."
        )
    return torch.ops.kitty.merge_states(outputs, lse, dtype or outputs.dtype)


@torch.library.custom_op(
    "kitty::merge_states",
    mutates_args=(),
    schema="(Tensor outputs, Tensor lse, ScalarType dtype) -> (Tensor, Tensor)",
)
def _merge_states(outputs: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not runs_kernel(outputs):
        out, total = merge_states_reference(outputs, lse)
        return out.to(dtype).contiguous(), total.contiguous()
    from kitty.ops.merge_states.kernel import launch_merge_states

    result = _results(outputs, lse, dtype)
    with on_device_of(outputs):
        launch_merge_states(outputs, lse, *result)
    return result


@_merge_states.register_fake
def _merge_states_fake(outputs: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _results(outputs, lse, dtype)


def _results(outputs: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*outputs.shape[:-2], outputs.shape[-1])
    return outputs.new_empty(shape, dtype=dtype), lse.new_empty(lse.shape[:-1])

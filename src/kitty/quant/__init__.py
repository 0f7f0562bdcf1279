"""The specification of Kitty's quantization in plain torch.

Every other part (kernels, packed pages, simulation, byte reports) follows these functions.
"""

from kitty.quant.groupwise import FP16_MAX, Quantized, dequantize, quantize
from kitty.quant.pages import (
    QuantizedKeys,
    QuantizedValues,
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
)
from kitty.quant.selection import channel_scores, hash_channels, select_channels

__all__ = [
    "FP16_MAX",
    "Quantized",
    "QuantizedKeys",
    "QuantizedValues",
    "channel_scores",
    "dequantize",
    "dequantize_keys",
    "dequantize_values",
    "hash_channels",
    "quantize",
    "quantize_keys",
    "quantize_values",
    "select_channels",
]

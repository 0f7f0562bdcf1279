"""The kernels and shapes that the compile report covers; one dict a variant.

``types`` names arguments that are not int32; all pointers and strides count as multiples of 16.
Optional: ``mma`` True where tensor-core instructions must be there and the page loop must hold no
integer-to-float conversion; ``main`` True for the variants of the quick test.
"""

from __future__ import annotations

from types import ModuleType

PAGES = {"G": 128, "D": 128, "D_BOOST": 32, "BLOCK_D": 128}
GROUPS = {"GROUP": 128, "BLOCK_GROUP": 128}
NO_FUSION = {"num_warps": 4, "enable_fp_fusion": False}
APPEND = {"num_warps": 4, "enable_fp_fusion": False, "maxnreg": 128}
KEY_PAGE_TYPES = {
    "p_key_words": "*i16",
    "p_key_high": "*i16",
    "p_key_meta": "*fp16",
    "p_key_boosted": "*u8",
}
VALUE_PAGE_TYPES = {"p_value_words": "*i16", "p_value_meta": "*fp16"}
LENGTH_TYPES = {
    "p_seq_lens": "*i32",
    "p_paged_lens": "*i32",
    "p_num_new": "*i32",
    "p_key_table": "*i32",
    "p_value_table": "*i32",
    "p_table": "*i32",
}
STORAGE_TYPES = {"p_words": "*i16", "p_high": "*i16", "p_meta": "*fp16", "p_boosted": "*u8"}


def _quantize_keys(name: str, dtype: str = "fp16", **changes: object) -> dict:
    def choices(module: ModuleType) -> tuple[dict, dict]:
        constants = {**PAGES, "UNPAGED": 32, "SINK": 32, "SELECTION": "magnitude", "ASM": True}
        constants |= changes
        block_d = constants["BLOCK_D"]
        warps = module.key_warps(block_d, constants["SELECTION"])
        options = {"UNROLL": module.KEY_UNROLL, "num_warps": warps}
        return _with_options(module, constants, options, block_d)

    return {
        "name": f"quantize_keys{name}",
        "module": "kitty.ops.quantize_pages.kernel",
        "kernel": "quantize_keys_kernel",
        "types": {"p_k": f"*{dtype}", **STORAGE_TYPES, **LENGTH_TYPES},
        "constants": choices,
        "options": {},
    }


def _with_options(
    module: ModuleType, constants: dict, options: dict, block_d: int | None
) -> tuple[dict, dict]:
    """The op's options, those of its constants apart."""
    options = {**options, "enable_fp_fusion": False}
    constants["UNROLL"] = options.pop("UNROLL")
    if block_d is not None:
        constants["STEP"] = module.rows_at_once(constants["G"], block_d, options["num_warps"])
    return constants, options


def _quantize_values(name: str, dtype: str = "fp16", **changes: int) -> dict:
    def choices(module: ModuleType) -> tuple[dict, dict]:
        constants = {"G": 128, "D": 128, **GROUPS, "UNPAGED": 160, "SINK": 32, "ASM": True}
        constants |= changes
        cap = {"maxnreg": module.VALUE_REGISTERS} if constants["D"] <= 128 else {}
        return _with_options(module, constants, {**module.VALUE_OPTIONS, **cap}, None)

    return {
        "name": f"quantize_values{name}",
        "module": "kitty.ops.quantize_pages.kernel",
        "kernel": "quantize_values_kernel",
        "types": {"p_v": f"*{dtype}", **STORAGE_TYPES, **LENGTH_TYPES},
        "constants": choices,
        "options": {},
    }


def _append(name: str, dtype: str = "fp16", **changes: object) -> dict:
    buffers = ("p_k", "p_v", "p_sink_k", "p_sink_v", "p_key_ring", "p_value_ring")
    return {
        "name": f"append{name}",
        "module": "kitty.ops.append.kernel",
        "kernel": "append_kernel",
        "types": {
            **dict.fromkeys(buffers, f"*{dtype}"),
            **KEY_PAGE_TYPES,
            **VALUE_PAGE_TYPES,
            **LENGTH_TYPES,
        },
        "constants": {
            **PAGES,
            **GROUPS,
            "BLOCK_T": 1,
            "SINK": 32,
            "KEY_UNPAGED": 32,
            "VALUE_UNPAGED": 160,
            "KEY_RING": 129,
            "VALUE_RING": 257,
            "RAGGED": False,
            "SELECTION": "magnitude",
            "STEP": 8,
            "UNROLL": 1,
            "ASM": True,
            **changes,
        },
        "options": APPEND,
    }


def _dequantize(kind: str) -> dict:
    keys = kind == "keys"
    return {
        "name": f"dequantize_{kind}",
        "module": "kitty.ops.dequantize_pages.kernel",
        "kernel": f"dequantize_{kind}_kernel",
        "types": {"p_out": "*fp16", "p_boost_index": "*u8", **STORAGE_TYPES, **LENGTH_TYPES},
        "constants": PAGES if keys else {"G": 128, "D": 128, **GROUPS},
        "options": NO_FUSION,
    }


def _decode(
    name: str,
    dtype: str = "fp16",
    *,
    head_dim: int = 128,
    num_boosted: int = 32,
    queries_per_kv: int = 4,
    num_tokens: int = 1,
    softcap: float = 0.0,
) -> dict:
    def choices(module: ModuleType) -> tuple[dict, dict]:
        plan = module.launch_plan(queries_per_kv, num_tokens, head_dim)
        constants = {
            "G": 128,
            "D": head_dim,
            "D_BOOST": num_boosted,
            "GROUP": min(head_dim, 128),
            "QUERIES_PER_KV": queries_per_kv,
            "T": num_tokens,
            "BLOCK_N": plan.block_n,
            "BLOCK_D": 1 << (head_dim - 1).bit_length(),
            "BLOCK_B": max(16, 1 << (num_boosted - 1).bit_length()) if num_boosted else 16,
            "BLOCK_V": plan.block_v,
            "SINK": 32,
            "KEY_UNPAGED": 32,
            "VALUE_UNPAGED": 160,
            "KEY_RING": 129,
            "VALUE_RING": 257,
            "SOFTCAP": softcap,
            "ASM": True,
            "MOVMATRIX": module.MOVMATRIX_HOLDS,
        }
        return constants, {"num_warps": plan.num_warps, "num_stages": plan.num_stages}

    buffers = ("p_query", "p_sink_k", "p_sink_v", "p_key_ring", "p_value_ring")
    return {
        "name": f"decode{name}",
        "module": "kitty.ops.decode_attention.kernel",
        "kernel": "decode_kernel",
        "types": {
            **dict.fromkeys(buffers, f"*{dtype}"),
            **KEY_PAGE_TYPES,
            **VALUE_PAGE_TYPES,
            **LENGTH_TYPES,
            "p_key_words": "*u16",
            "p_key_high": "*u16",
            "p_value_words": "*u16",
            "p_out": "*fp32",
            "p_lse": "*fp32",
            "softmax_scale": "fp32",
        },
        "constants": choices,
        "options": {},
        "mma": True,
    }


def _merge() -> dict:
    return {
        "name": "merge_states",
        "module": "kitty.ops.merge_states.kernel",
        "kernel": "merge_states_kernel",
        "types": {
            "p_outputs": "*fp32",
            "p_lse": "*fp32",
            "p_out": "*fp16",
            "p_total": "*fp32",
        },
        "constants": {"D": 128, "BLOCK_D": 128, "BLOCK_S": 8},
        "options": {"num_warps": 1},
        "main": True,
    }


VARIANTS: list[dict] = [
    {**_quantize_keys(""), "main": True},
    _quantize_keys("-bf16", "bf16"),
    _quantize_keys("-random", SELECTION="random"),
    _quantize_keys("-variance", SELECTION="variance"),
    _quantize_keys("-rotary", SELECTION="rotary"),
    _quantize_keys("-unboosted", D_BOOST=0),
    _quantize_keys("-all-boosted", D_BOOST=128),
    _quantize_keys("-d80", D=80, D_BOOST=20),
    _quantize_keys("-d256", D=256, D_BOOST=64, BLOCK_D=256),
    {**_quantize_values(""), "main": True},
    _quantize_values("-bf16", "bf16"),
    _quantize_values("-d80", D=80, GROUP=80),
    _quantize_values("-d256", D=256),
    {**_append(""), "main": True},
    _append("-bf16", "bf16"),
    _append("-chunk", BLOCK_T=16, RAGGED=True, KEY_RING=256, VALUE_RING=384),
    {**_dequantize("keys"), "main": True},
    {**_dequantize("values"), "main": True},
    {**_decode(""), "main": True},
    _decode("-bf16", "bf16"),
    _decode("-unboosted", num_boosted=0),
    _decode("-all-boosted", num_boosted=128),
    _decode("-d80", head_dim=80, num_boosted=20),
    _decode("-d256", head_dim=256, num_boosted=64),
    _decode("-16-heads", queries_per_kv=16),
    _decode("-3-tokens", num_tokens=3),
    _decode("-capped", softcap=50.0),
    _decode("-capped-d256", head_dim=256, num_boosted=64, queries_per_kv=2, softcap=50.0),
    _decode("-capped-3-tokens", num_tokens=3, softcap=50.0),
    _merge(),
]

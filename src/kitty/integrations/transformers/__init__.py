"""Hook into transformers 4.53.2: attention and mask functions, caches, enable and disable.

Importing it registers the attention implementation ``kitty``.
"""

from kitty.integrations.transformers.attention import register
from kitty.integrations.transformers.cache import KittyCache, KittyCacheBase, SimulatedCache
from kitty.integrations.transformers.enable import disable, enable
from kitty.integrations.transformers.native import native_cache, prepare_native

register()

__all__ = [
    "KittyCache",
    "KittyCacheBase",
    "SimulatedCache",
    "disable",
    "enable",
    "native_cache",
    "prepare_native",
]

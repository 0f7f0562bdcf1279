"""Models with random weights, made directly on the device from a shape in configs/shapes.yaml.

Speed and memory of generation do not depend on what the weights are, only on their sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitty.config_files import load_config
from kitty.errors import KittyError
from kitty.paths import configs_dir

if TYPE_CHECKING:
    import torch

STD = 0.02  # of the random weights: activations stay within fp16 in models of any depth


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        name: in records.
        fields: of a config of transformers, ``model_type`` among them.
        source: where they come from.
    """

    name: str
    fields: dict[str, Any]
    source: str


@functools.cache
def known_shapes() -> dict[str, dict[str, Any]]:
    """The entries of configs/shapes.yaml by name."""
    return dict(load_config("shapes", configs_dir() / "shapes.yaml")["shapes"])


def find_shape(name_or_file: str | Path) -> Shape:
    """A shape by its name, or from a config.json of transformers.

    Raises:
        KittyError: it is neither.
    """
    import json

    name = str(name_or_file)
    if name in known_shapes():
        return Shape(name, known_shapes()[name], f"random weights, configs/shapes.yaml {name}")
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        try:
            fields = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise KittyError(f"The model config {path} cannot be read: {error}.") from error
        if not isinstance(fields, dict) or "model_type" not in fields:
            raise KittyError(
                f"The model config {path} has no model_type: give a config.json of transformers."
            )
        label = path.parent.name if path.stem == "config" and path.parent.name else path.stem
        return Shape(label.lower(), fields, f"random weights, {path.name}")
    raise KittyError(
        f"Model config {name!r} is not known: use one of {', '.join(known_shapes())}, or the path "
        "of a config.json of transformers."
    )


def config_of(shape: Shape) -> Any:
    """The config object of transformers.

    Raises:
        KittyError: transformers does not know the type, or refuses the fields.
    """
    from transformers import AutoConfig

    fields = dict(shape.fields)
    try:
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (ValueError, TypeError, KeyError) as error:
        raise KittyError(
            f"The shape {shape.name!r} is no model of transformers: {' '.join(str(error).split())}."
        ) from error


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a model's weights, without making any."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def random_model(
    shape: Shape, dtype: torch.dtype, device: str, attn_implementation: str, seed: int = 0
) -> Any:
    """A model in eval mode whose matrices are normal numbers, norms ones and biases zeros.

    Args:
        shape: its sizes.
        dtype: of the weights.
        device: on which they are made; nothing is held elsewhere.
        attn_implementation: attention function of transformers.
        seed: of the numbers.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config_of(shape), torch_dtype=dtype, attn_implementation=attn_implementation
        )
    model.tie_weights()  # left out together with the initialization
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model.eval()

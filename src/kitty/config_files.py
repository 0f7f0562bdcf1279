"""Configuration files: YAML, checked against a schema in configs/schemas.

Methods, models and experiments are read here, so a mistake in any of them is told alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from kitty.errors import KittyError
from kitty.paths import configs_dir


def load_config(kind: str, path: Path) -> Any:
    """Content of a configuration file that keeps to ``schemas/<kind>.schema.json``.

    Args:
        kind: ``methods``, ``models``, ``experiment``, ``tolerances`` or ``site``.
        path: the file.

    Raises:
        KittyError: the file is missing, is no YAML, or breaks the schema; says where.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise KittyError(f"The {kind} file {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise KittyError(f"The {kind} file {path} is not valid YAML: {reason}.") from error
    schema = json.loads((configs_dir() / "schemas" / f"{kind}.schema.json").read_text())
    # a misspelt key also leaves the right one missing: its own name helps more
    fault = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(content),
        key=lambda error: (
            error.validator == "additionalProperties",
            jsonschema.exceptions.relevance(error),
        ),
    )
    if fault is not None:
        where = "/".join(str(part) for part in fault.absolute_path) or "the top level"
        raise KittyError(f"The {kind} file {path} is wrong at {where}: {fault.message}.")
    return content

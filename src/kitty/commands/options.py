"""Options of the command line that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Name, local folder, or hub:OWNER/NAME.")
]
RunCodeOption = Annotated[
    bool, typer.Option("--run-code", help="Let tasks such as HumanEval run what the model writes.")
]

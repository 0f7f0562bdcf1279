"""Snakemake, quiet about an interrupt from the keyboard: `python -m kitty.snakemake ARGUMENTS`.

It ends its jobs on an interrupt, but answers one that comes while it starts with a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run Snakemake with this process's arguments."""
    # The launcher starts this with interrupts held back, so that none comes before this line.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from snakemake.cli import main as snakemake

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        snakemake()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

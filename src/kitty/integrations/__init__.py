"""Hooks into frameworks; the only package below the command line that imports them."""

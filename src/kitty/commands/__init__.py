"""Commands of the command line, one module per area; each is registered in kitty.cli by one line.

Heavy imports stand inside the functions, so that `kitty --help` stays quick.
"""

"""One module per subcommand of `slipstream`.

Imported by main when the subcommand is called.
"""

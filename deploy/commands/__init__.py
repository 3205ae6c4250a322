"""One module per subcommand of `slipstream`.

main imports the one that is called.
"""

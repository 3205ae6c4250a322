"""SGLang 0.5.23: its server as a process, its HTTP control, and corrections it needs.

server alone imports sglang, in the server's own process; everything else talks HTTP.
Imported by deploy and generators.
"""

"""Compares what learner, SGLang and transformers compute of the same tokens.

Called by `slipstream align` alone.
"""

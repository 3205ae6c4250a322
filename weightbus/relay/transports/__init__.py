"""How buckets travel from the relay to engines, one module per way.

A transport sees a publication and members; it knows nothing of the publisher.
"""

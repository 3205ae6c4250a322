"""The weight plane: how a published policy version reaches the generators."""

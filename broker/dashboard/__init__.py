"""The live page and the metrics endpoint, served by the broker."""

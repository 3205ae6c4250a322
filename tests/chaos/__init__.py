"""Runs whose processes are killed, stopped, cut off and lied to."""

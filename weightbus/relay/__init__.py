"""The relay's process: brings the newest version to every engine, and outlives the learner.

publisher decides when, transaction runs one publish, transports move the bytes.
It is started, not imported.
"""

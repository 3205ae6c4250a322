"""Plain sentences about a run: what is wrong, by how much, and which setting changes it.

Pure: a state of the run and its newest history in, sentences out.
Imported by broker.dashboard, broker.history and deploy.terminal.
"""

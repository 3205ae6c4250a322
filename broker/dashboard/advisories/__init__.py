"""Plain sentences about a run: what is wrong, by how much, and which setting changes it.

Pure: a state of the run and the newest history in, sentences out. A rule speaks once its measure,
taken over a window, passed the rule's limit lately, and until the measure is a fifth below that;
before its window is full it is silent. Each rule has a section of its name in
docs/operations.md.
"""

"""Network parts of both sides: authenticated listeners, interfaces, rendezvous, library versions.

Knows no version and no engine.
Imported by deploy.preflight.check, generators, learner, weightbus.agent, weightbus.hosts,
weightbus.relay and weightbus.transports.
"""

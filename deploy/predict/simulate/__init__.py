"""Runs in virtual time: the real ledger; engines, a learner and publishes that follow laws.

No sockets, processes or clocks; a seed decides everything.
Imported by deploy.predict.advise and deploy.commands.
"""

"""Several hosts of one role meet, compare cards, watch each other and end together (docs/adr/0062).

Node 0 leads, the others follow it over one keyed socket. book and verdict decide; leader and
follower have the link. Imported by deploy.preflight.check, generators
and learner.nodes.
"""

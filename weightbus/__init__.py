"""The weight plane: how a published policy version reaches the generators.

relay is a process; version, agent and net are shared by the learner, the agents and it. In hosts
those of one role meet.
"""

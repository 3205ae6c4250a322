"""From a prompt to token ids and back, and chat templates. Pure, without SGLang or transformers.

Imported by deploy.commands, deploy.demonstrations, deploy.preflight.check and generators.
"""

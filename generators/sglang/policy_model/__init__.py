"""Package for SGLANG_EXTERNAL_MODEL_PACKAGE: the model class of the policy alone.

Imported by SGLang's model registry, in the processes of a server.
"""

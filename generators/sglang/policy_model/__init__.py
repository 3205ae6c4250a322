"""Package for SGLANG_EXTERNAL_MODEL_PACKAGE: the model class of the policy alone.

SGLang's model registry imports it, in the processes of a server.
"""

"""LoRA adapters of the model, and their files under the names of PEFT.

Imported by learner.
"""

"""Online Scaled DeltaNet: the delta rule with an online, provable preconditioner."""

__version__ = "0.1.0"

"""Our operators inside the delta-rule models of `transformers`: `osdn.accelerate`."""

from osdn.hosts.names import accelerate

__all__ = ["accelerate"]

"""The package's extras: operators and layers need torch and numpy alone, everything else a little more."""

from importlib.util import find_spec


class MissingExtraError(ModuleNotFoundError):
    """A part of the package was used whose requirements are not installed."""


def require(part: str, extra: str, *modules: str) -> None:
    """Say which command installs what `part` needs, if some of its modules are not there."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f'{part} needs {", ".join(missing)}: pip install "osdn[{extra}]"', name=missing[0]
        )

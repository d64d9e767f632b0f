"""Makes the Auto classes of `transformers` find our models, without importing either of them early.

`transformers` has a table of configuration names by model type, and imports `transformers.models.TYPE` when
a checkpoint of that type is opened.  We add our type to the table, now or as soon as the table is imported,
and answer the import of `transformers.models.osdn` with `osdn.models`, which registers everything else.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TABLE = "transformers.models.auto.configuration_auto"
ALIAS = "transformers.models.osdn"


def install() -> None:
    """Add our model type to the table, whether `transformers` was imported already or will be later."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if TABLE in sys.modules:
        _add_type(import_module(TABLE))  # waits if another thread is still importing it


def _add_type(table: ModuleType) -> None:
    table.CONFIG_MAPPING_NAMES.setdefault("osdn", "OSDNConfig")


class _Finder:
    """Finds the alias, and the table as Python would, with our type added once it has been executed."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == ALIAS:
            return ModuleSpec(name, _AliasLoader())  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path, target) if name == TABLE else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                _add_type(module)

            spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec


class _AliasLoader:
    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes the module, which `exec_module` then replaces."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module("osdn.models")

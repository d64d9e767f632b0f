"""The options of `osdn lab TASK`: the fields of the task, explained by its docstring.

The command line reads them from task_options.json: importing a task imports torch, and help should appear at
once.  After a change to a task, `python -m osdn.cli.task_options` writes the file again.
"""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

FILE = Path(__file__).with_suffix(".json")
FIXED = ("folder", "evaluation", "power")  # fields that are not options


def load() -> dict[str, Any]:
    """Help, sizes and options of every task, by name."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def collect() -> dict[str, Any]:
    """The same, from the tasks themselves."""
    from osdn.lab.tasks import EXPERIMENTS

    return {
        name: {
            "help": experiment.words,
            "seeds": experiment.seeds,
            "steps": experiment.steps,
            "batch": experiment.batch,
            "options": _options(experiment.task),
        }
        for name, experiment in EXPERIMENTS.items()
    }


def _options(task: Any) -> dict[str, Any]:
    hints, docs = get_type_hints(type(task)), field_docs(type(task))
    return {
        field.name: {
            "type": list(get_args(hints[field.name])) or hints[field.name].__name__,
            "default": getattr(task, field.name),
            "help": docs[field.name],
        }
        for field in fields(task)
        if field.name not in FIXED
    }


def field_docs(task: type) -> dict[str, str]:
    """What the docstring of a task says about each of its fields."""
    text = inspect.cleandoc(task.__doc__ or "").partition("Args:\n")[2]
    documented = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", doc[:1].upper() + doc[1:]) for name, doc in documented}


if __name__ == "__main__":
    FILE.write_text(json.dumps(collect(), indent=1) + "\n", encoding="utf-8")

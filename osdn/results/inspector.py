"""The inspector's page: the template inspector.html, filled with one prompt's measurements."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from osdn.results.names import title


def write_inspector(path: Path, data: dict[str, Any]) -> Path:
    """Write the page, a single self-contained file; `data` comes from `osdn.analysis.inspector`."""
    template = files("osdn.results").joinpath("inspector.html").read_text(encoding="utf-8")
    data = {**data, "title": title(data["title"])}
    text = json.dumps(data).replace("<", "\\u003c")  # a token "</script>" must not end the data
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(template.replace("@DATA@", text), encoding="utf-8")
    return path

"""The notebooks run from top to bottom, and what they print and draw is committed with them."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def outputs(notebook, kind):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs if output.output_type == kind]


def test_there_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["memory", "retrofit"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_committed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))  # run once, in order
    assert not outputs(notebook, "error")
    assert outputs(notebook, "stream")
    assert any("image/png" in output.data for output in outputs(notebook, "display_data"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_top_to_bottom(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    figures = len(outputs(notebook, "display_data"))
    done = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(outputs(done, "display_data")) == figures

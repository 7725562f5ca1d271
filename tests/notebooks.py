"""``python tests/notebooks.py [NAME…]``: run the notebooks and keep what they show.

Outputs are kept for the documentation, without times, paths and counters that change from run to
run. The tests run every notebook too, in a folder of its own, and keep nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
NOTEBOOKS = sorted((HERE / "docs" / "notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path) -> Any:
    """The notebook after a run in ``folder``; a cell that fails raises."""
    import nbformat
    from nbclient import NotebookClient

    os.environ |= {"OMP_NUM_THREADS": "1"}
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    return notebook


def tidy(notebook: Any) -> Any:
    """The same without what changes from machine to machine."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


def main(names: list[str]) -> None:
    """Run the notebooks whose names are given, or all."""
    import nbformat

    for path in NOTEBOOKS:
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(tidy(executed(path, Path(folder))), path)
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Documents that show results: the text between two marks is written by the command that they name."""

from pathlib import Path


def marks(command: str) -> tuple[str, str]:
    """The lines around the part of a document that a command makes."""
    return f"<!-- made by {command}: begin -->", f"<!-- made by {command}: end -->"


def filled(document: str, command: str, part: str) -> str:
    """The document with another text between the marks of a command."""
    begin, end = marks(command)
    before, _, from_begin = document.partition(begin)
    _, found, after = from_begin.partition(end)
    if not found:
        raise ValueError(f"the document has {begin!r} but not {end!r}; add it where the results end")
    return f"{before}{begin}\n\n{part}\n{end}{after}"


def fill(path: Path, command: str, part: str) -> bool:
    """Replace the text between the marks of a command in a file, if the file and the marks exist."""
    document = path.read_text(encoding="utf-8") if path.is_file() else ""
    if marks(command)[0] not in document:
        return False
    path.write_text(filled(document, command, part), encoding="utf-8")
    return True

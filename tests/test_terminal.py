"""What reaches a terminal."""

import re

import pytest
import typer

from osdn.terminal import plain_errors, printable

HOSTILE = {
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x1b[31mred": r"\x1b[31mred",
    "over\rwritten": r"over\rwritten",
    "\x9b2J": r"\x9b2J",  # the one-character form of ESC [
    "back\x08\x7f": r"back\x08\x7f",
    "\u202egnp.exe": r"\u202egnp.exe",  # right to left
    "\udcff": r"\udcff",  # a byte of a file name that is not UTF-8
    "\x00": r"\x00",
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items(), ids=map(ascii, HOSTILE))
def test_control_characters_are_spelled_out(text, shown):
    assert printable(f"a {text} b") == f"a {shown} b"


@pytest.mark.parametrize(
    "text", ["", "plain\n\ttext", "naïve 中文 🎈", "\N{FAMILY}\u200d\N{BOY}", "[bold]", "a\\x1b"]
)
def test_printable_text_is_unchanged(text):
    assert printable(text) == text


@pytest.mark.parametrize("text", HOSTILE, ids=map(ascii, HOSTILE))
def test_errors_cannot_write_control_characters(text, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with pytest.raises(typer.Exit), plain_errors():
        raise ValueError(f"run {text} [red] is no run")
    told = capsys.readouterr().err
    assert f"run {HOSTILE[text]} [red] is no run".encode() in _colourless(told)
    assert text.encode("utf-8", "replace") not in told.encode("utf-8", "replace")


def _colourless(text: str) -> bytes:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).encode("utf-8", "replace")

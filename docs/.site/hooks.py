"""What the site needs beyond Markdown: formulas as MathML, and links to files that are not pages."""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)[^)]*\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to sources work in a clone and on GitHub; on the site they become plain text."""
    folder = Path(page.file.abs_src_path).parent

    def text_only(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {found[2]}, which does not exist")
        return found[1]

    return LINK.sub(text_only, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """TeX to MathML, which browsers draw without a script."""

    def mathml(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        return convert(html.unescape(found[2]).strip()[2:-2].strip(), display=display)

    return FORMULA.sub(mathml, content)

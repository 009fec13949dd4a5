"""A picture of the terminal for the documents, of a real session. Run: python tools/terminal_picture.py FILE.png

It types into `trireme chat` in a pseudo-terminal, takes what it shows, and draws that in Chromium. Needs Chromium and playwright.
"""

from __future__ import annotations

import html
import os
import pathlib
import pty
import re
import select
import sys
import time

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.web.conftest import CHROMIUM, FLAGS

TYPED = ("What is the capital of Japan?", "And of Italy?", "/exit")
PROMPT = "> "
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]|\x07|\r")
STYLE = """body {margin: 0; background: #14181d; color: #e6e9ee; font: 15px/1.5 "DejaVu Sans Mono", monospace; padding: 18px 22px}
pre {margin: 0; font: inherit; white-space: pre-wrap} b {color: #8ec7ff; font-weight: 600}"""


def session(patience: float = 120.0) -> str:
    """Returns what the terminal shows. Each line is typed when the prompt has appeared."""
    pid, terminal = pty.fork()
    if not pid:
        os.environ.update(TERM="xterm", COLUMNS="96", LINES="30")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the progress bars of loading
        os.execv(sys.executable, [sys.executable, "-m", "trireme", "chat", "--temperature", "0"])
    shown, waiting, deadline = "", list(TYPED), time.monotonic() + patience
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1.0)[0]:
            if waiting and ESCAPES.sub("", shown).endswith(PROMPT):
                os.write(terminal, waiting.pop(0).encode() + b"\n")
            continue
        try:
            piece = os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # the other side of the pseudo-terminal is closed
            break
        if not piece:
            break
        shown += piece
    os.waitpid(pid, 0)
    return ESCAPES.sub("", shown)


def picture(text: str, file: pathlib.Path) -> None:
    lines = [f"<b>{html.escape(line)}</b>" if line.startswith((PROMPT, "$ ")) else html.escape(line) for line in text.splitlines()]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 860, "height": 200})
        page.set_content(f"<style>{STYLE}</style><pre>{chr(10).join(lines)}</pre>")
        page.screenshot(path=file, full_page=True)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/terminal_picture.py FILE.png")
    picture("$ trireme chat --temperature 0\n" + session().strip(), pathlib.Path(sys.argv[1]))
